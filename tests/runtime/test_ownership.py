# SPDX-License-Identifier: Apache-2.0
"""Folders in which another user could put other files in the place of ours are refused."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.runtime.observation.events import EventLog, EventName, read_events
from megatron_moevement.runtime.security import ownership
from megatron_moevement.runtime.security.ownership import check_folder, trusted_owners
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.stores.store import StoreDirectory

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs to act as another user")

STRANGER = 65534
IDENTITY = StoreIdentity("run-1", "0123abcd")


@pytest.fixture
def public():
    """Returns a folder like /tmp, in which everybody may write."""
    folder = Path(tempfile.mkdtemp(prefix="moevement-public-", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def as_stranger(code, *arguments):
    """Runs Python code as another user."""
    command = ["/usr/bin/env", "-i", sys.executable, "-I", "-c", code, *map(str, arguments)]
    return subprocess.run(
        command, user=STRANGER, group=STRANGER, extra_groups=[], capture_output=True, check=False
    )


def stranger_makes(folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    os.chown(folder, STRANGER, STRANGER)


@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o755])
def test_a_store_directory_that_another_user_made_first_is_refused(public, mode):
    root = public / "moevement-0"
    stranger_makes(root, mode)
    with pytest.raises(UserError, match=f"{root} is another user's; give another --moevement"):
        StoreDirectory(root, IDENTITY, 0)
    assert list(root.iterdir()) == []


def test_so_is_one_below_it(public):
    stranger_makes(public / "lent", 0o1777)
    (public / "lent" / "mine").mkdir()
    with pytest.raises(UserError, match=r"every user may write in .*lent, which is another user's"):
        StoreDirectory(public / "lent" / "mine", IDENTITY, 0)


def test_so_is_one_that_anybody_may_rename(public):
    public.chmod(0o777)
    with pytest.raises(UserError, match=f"`chmod o-w {public}`"):
        StoreDirectory(public / "mine", IDENTITY, 0)
    public.chmod(0o1777)
    StoreDirectory(public / "mine", IDENTITY, 0).close()


def test_so_is_one_behind_a_link_of_another_user(public):
    (public / "real").mkdir()
    (public / "link").symlink_to(public / "real")
    os.chown(public / "link", STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(UserError, match="link is another user's"):
        StoreDirectory(public / "link", IDENTITY, 0)
    check_folder(public / "real", "--flag")


def test_what_is_there_no_other_user_moves_away(public):
    with StoreDirectory(public / "moevement-0", IDENTITY, 0) as store:
        moved = as_stranger(
            "import os, sys; os.rename(sys.argv[1], sys.argv[1] + 'x')", store.folder.parent
        )
        assert moved.returncode != 0
        assert as_stranger("import os, sys; os.listdir(sys.argv[1])", store.folder).returncode != 0
        assert store.folder.is_dir()


def test_a_folder_that_a_user_lends_is_the_users_choice(public):
    stranger_makes(public / "project", 0o755)
    (public / "project" / "mine").mkdir()
    check_folder(public / "project" / "mine", "--flag")


def test_in_a_user_namespace_the_system_may_have_the_overflow_user(monkeypatch):
    assert trusted_owners() == {0}
    monkeypatch.setattr(ownership, "_read", lambda name: "1000 1000 1\n")
    assert trusted_owners() == {0, STRANGER}


def test_events_do_not_go_where_another_user_owns_the_folder(public):
    stranger_makes(public / "events", 0o1777)
    with pytest.raises(UserError, match=r"--moevement-event-dir .*events is another user's"):
        EventLog(public / "events", 0, 0)


def test_processes_of_one_host_name_and_number_have_a_file_each(public, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "container")
    code = (
        "import os, socket, sys\n"
        "socket.gethostname, os.getpid = lambda: 'container', lambda: 7\n"
        "from megatron_moevement.runtime.observation.events import EventLog, EventName\n"
        f"EventLog({str(public)!r}, 0, 0).emit(EventName.ITERATION, 1)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], env=env, check=True)
    files = sorted(public.glob("container-7-*.jsonl"))
    assert len(files) == 2
    assert [path.stat().st_mode & 0o7777 for path in files] == [0o644 & ~_umask()] * 2


def test_a_link_in_the_place_of_the_file_is_not_followed(public):
    target = public / "target"
    target.write_text("precious")
    with EventLog(public, 0, 0) as events:
        events.emit(EventName.ITERATION, 1)
    (path,) = public.glob("*.jsonl")
    path.unlink()
    path.symlink_to(target)
    with pytest.raises(UserError, match="--moevement-event-dir"):
        EventLog(public, 0, 1)
    path.unlink()
    with EventLog(public, 0, 2) as events:
        events.emit(EventName.ITERATION, 2)
    assert target.read_text() == "precious"
    assert [event.iteration for event in read_events(public)] == [2]


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask
