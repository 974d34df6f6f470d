# SPDX-License-Identifier: Apache-2.0
"""The leak check sees each kind of leak, in a block and around a test."""

import mmap
import multiprocessing.shared_memory
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.harness import leaks
from tests.harness.leaks import (
    LeakError,
    ResourceKind,
    folder_prefix,
    leaked_since,
    no_leaks,
    open_resources,
)

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.one_at_a_time  # beside nobody else who makes files in shared memory

_UNTIL_STDIN_CLOSES = [sys.executable, "-c", "import sys; sys.stdin.read()"]


@pytest.fixture(autouse=True)
def _settle_soon(monkeypatch):
    monkeypatch.setattr(leaks, "SETTLING_TIME_S", 0.2)


@pytest.fixture
def clean_in_the_end(monkeypatch, _settle_soon):
    """For what must turn out clean, however slow the machine is."""
    monkeypatch.setattr(leaks, "SETTLING_TIME_S", 60.0)


@pytest.fixture
def run_pytest(pytester, monkeypatch):
    """Runs pytest with the plugin on the test file of the pytester's folder."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    pytester.makeconftest("from tests.harness import leaks\nleaks.SETTLING_TIME_S = 0.2\n")
    return lambda: pytester.runpytest_subprocess("-p", "tests.harness.leaks_fixture")


def _kinds(caught: pytest.ExceptionInfo[LeakError]) -> list[ResourceKind]:
    return [resource.kind for resource in caught.value.leaked]


@pytest.fixture
def shared_memory_name():
    path = Path("/dev/shm") / f"moevement_leak_test_{os.getpid()}"
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.usefixtures("clean_in_the_end")
def test_a_block_that_closes_what_it_opens_is_clean(tmp_path):
    with no_leaks():
        thread = threading.Thread(target=time.sleep, args=(0.01,))
        thread.start()
        with (tmp_path / "file").open("w"), socket.create_server(("127.0.0.1", 0)):
            subprocess.run([sys.executable, "-c", ""], check=True)
        thread.join()


def test_a_running_thread_is_a_leak():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten", daemon=True)
    with pytest.raises(LeakError, match="forgotten") as caught, no_leaks():
        thread.start()
    stop.set()
    thread.join()
    assert _kinds(caught) == [ResourceKind.THREAD]


def test_an_open_socket_is_a_leak():
    with pytest.raises(LeakError, match="socket:") as caught, no_leaks():
        server = socket.create_server(("127.0.0.1", 0))
    server.close()
    assert _kinds(caught) == [ResourceKind.DESCRIPTOR]


def test_an_open_file_is_a_leak(tmp_path):
    with pytest.raises(LeakError, match="some_file") as caught, no_leaks():
        file = (tmp_path / "some_file").open("w")
    file.close()
    assert _kinds(caught) == [ResourceKind.DESCRIPTOR]


@pytest.mark.usefixtures("clean_in_the_end")
def test_what_only_a_cycle_of_garbage_keeps_open_is_no_leak():
    with no_leaks():
        cycle = [socket.create_server(("127.0.0.1", 0)).detach]
        cycle.append(cycle)
        del cycle


def test_a_running_child_is_a_leak():
    with pytest.raises(LeakError, match=r"sys\.stdin\.read") as caught, no_leaks():
        child = subprocess.Popen(_UNTIL_STDIN_CLOSES, stdin=subprocess.PIPE)
    child.communicate()
    assert ResourceKind.CHILD_PROCESS in _kinds(caught)


def test_a_child_that_nobody_waited_for_is_a_leak():
    with pytest.raises(LeakError, match="not waited for") as caught, no_leaks():
        pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    assert _kinds(caught) == [ResourceKind.CHILD_PROCESS]


def test_a_file_left_in_shared_memory_is_a_leak(shared_memory_name):
    with pytest.raises(LeakError, match=shared_memory_name.name) as caught, no_leaks():
        shared_memory_name.write_bytes(b"left behind")
    assert _kinds(caught) == [ResourceKind.SHARED_MEMORY]


@pytest.mark.parametrize("is_own", [True, False])
def test_a_folder_in_shared_memory_is_a_leak_of_the_run_whose_tests_have_it(monkeypatch, is_own):
    process = os.getpid() if is_own else 1
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: process)
        prefix = folder_prefix()
    before = open_resources()
    folder = tempfile.mkdtemp(prefix=prefix, dir="/dev/shm")
    leaked = leaked_since(before)
    os.rmdir(folder)
    assert [each.identity for each in leaked] == [folder] * is_own


@pytest.mark.usefixtures("clean_in_the_end")
def test_a_shared_memory_file_that_goes_by_itself_is_no_leak(shared_memory_name):
    removal = threading.Timer(0.05, shared_memory_name.unlink)
    with no_leaks():
        shared_memory_name.write_bytes(b"of another job")
        removal.start()
    removal.join()


def test_a_shared_memory_file_that_a_foreign_process_maps_is_its_own(shared_memory_name):
    mapping = (
        "import mmap, sys\n"
        f"file = open({str(shared_memory_name)!r}, 'w+b'); file.truncate({mmap.PAGESIZE})\n"
        "mapped = mmap.mmap(file.fileno(), 0); file.close()\n"
        "print('mapped', flush=True); sys.stdin.read()\n"
    )
    # A grandchild whose parent has ended is no child of this process.
    reading, writing = os.pipe()
    launcher = (
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {mapping!r}], stdin={reading})\n"
    )
    before = open_resources()
    started = subprocess.Popen(
        [sys.executable, "-c", launcher], pass_fds=[reading], stdout=subprocess.PIPE
    )
    os.close(reading)
    assert started.stdout.readline() == b"mapped\n"
    started.wait()
    assert shared_memory_name.exists()
    leaked = leaked_since(before)
    os.close(writing)
    started.stdout.read()
    started.stdout.close()
    assert ResourceKind.SHARED_MEMORY not in {resource.kind for resource in leaked}


def test_an_initialised_process_group_is_a_leak():
    with pytest.raises(LeakError, match=r"torch\.distributed") as caught, no_leaks():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    assert ResourceKind.PROCESS_GROUP in _kinds(caught)


def test_a_subgroup_is_a_leak_where_the_default_group_stays():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(LeakError) as caught, no_leaks():
        group = dist.new_group([0])
    dist.destroy_process_group(group)
    dist.destroy_process_group()
    assert ResourceKind.PROCESS_GROUP in _kinds(caught)


@pytest.mark.usefixtures("clean_in_the_end")
def test_the_resource_tracker_of_multiprocessing_may_stay():
    with no_leaks():
        block = multiprocessing.shared_memory.SharedMemory(create=True, size=1)
        block.close()
        block.unlink()


def test_the_error_of_a_block_is_not_hidden_by_its_leaks():
    opened = []

    def open_and_raise():
        opened.append(socket.create_server(("127.0.0.1", 0)))
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"), no_leaks():
        open_and_raise()
    opened[0].close()


_LEAKING_TESTS = {
    "thread": (
        "import threading, time\n"
        "def test_it():\n"
        "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    ),
    "descriptor": (
        "import socket\nkept = []\n"
        "def test_it():\n    kept.append(socket.create_server(('127.0.0.1', 0)))\n"
    ),
    "child process": (
        "import subprocess, sys\nkept = []\n"
        "def test_it():\n"
        f"    kept.append(subprocess.Popen({_UNTIL_STDIN_CLOSES!r}, stdin=subprocess.PIPE))\n"
    ),
    "shared-memory file": (
        "import atexit, os, pathlib\n"
        "def test_it():\n"
        "    path = pathlib.Path(f'/dev/shm/moevement_leak_test_{os.getpid()}')\n"
        "    path.touch()\n"
        "    atexit.register(path.unlink)\n"
    ),
    "process group": (
        "import torch.distributed as dist\n"
        "def test_it():\n"
        "    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
    ),
}


@pytest.mark.parametrize("kind", _LEAKING_TESTS)
def test_a_test_that_leaks_fails(pytester, run_pytest, kind):
    pytester.makepyfile(_LEAKING_TESTS[kind])
    result = run_pytest()
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines([f"*leaked: *{kind} *"])


def test_a_test_that_fails_is_reported_once(pytester, run_pytest):
    pytester.makepyfile(
        "import socket\nkept = []\n"
        "def test_it():\n"
        "    kept.append(socket.create_server(('127.0.0.1', 0)))\n"
        "    assert False\n"
    )
    result = run_pytest()
    result.assert_outcomes(failed=1)


def test_a_test_whose_fixture_closes_what_it_opens_passes(pytester, run_pytest):
    pytester.makepyfile(
        "import pytest, socket\n"
        "@pytest.fixture\n"
        "def server():\n    with socket.create_server(('127.0.0.1', 0)) as s:\n        yield s\n"
        "def test_it(server):\n    assert server.fileno() >= 0\n"
    )
    result = run_pytest()
    result.assert_outcomes(passed=1)
