# SPDX-License-Identifier: Apache-2.0
"""The folder of checkpoints: whatever kills a save where, one whole checkpoint can be loaded."""

import json
import os
import random
import shutil
import sys

import pytest

from megatron_moevement.training.checkpoints import (
    TRACKER,
    CheckpointFolder,
    checkpoint_files,
    record_file,
    write_atomically,
)

KILLED = 9
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def write(folder, iteration, version):
    """Writes the files of a checkpoint; their content tells which save they are of."""
    for name in ("common.pt", "__0_0.distcp", ".metadata"):
        (folder / name).write_text(f"{name} of {iteration}, {version}" * 100)


def save(root, iteration, version="first", retain=None):
    folder = CheckpointFolder(root)
    writing = folder.begin(iteration)
    write(writing, iteration, version)
    folder.commit(
        iteration, {name: record_file(writing / name) for name in checkpoint_files(writing)}
    )
    if retain:
        folder.retain(retain, iteration)


def loadable(root):
    """Returns iteration and version of what a new job would load, None when it finds nothing."""
    folder = CheckpointFolder(root)
    folder.recover()
    for iteration in folder.candidates():
        if folder.damage(iteration) is None:
            text = (folder.path(iteration) / "common.pt").read_text()
            version = text.removeprefix(f"common.pt of {iteration}, ").split("common.pt")[0]
            for name in ("common.pt", "__0_0.distcp", ".metadata"):
                expected = f"{name} of {iteration}, {version}" * 100
                assert (folder.path(iteration) / name).read_text() == expected
            return iteration, version
    return None


def killed_at(step, action):
    """Runs an action in a child that dies before its step-th change of the file system.

    Returns:
        Whether it died; else it came to its end.
    """
    child = os.fork()
    if child == 0:
        left = step

        def count(event, args):
            nonlocal left
            changes = event in CHANGES
            if event == "open":
                changes = bool(args[2] & (os.O_WRONLY | os.O_RDWR))
            left -= changes
            if changes and left < 0:
                os._exit(KILLED)

        try:
            sys.addaudithook(count)
            action()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED


def a_new_iteration(root):
    save(root, 2)
    return lambda: save(root, 4), ((2, "first"), (4, "first"))


def the_first_of_all(root):
    return lambda: save(root, 2), (None, (2, "first"))


def the_same_iteration_again(root):
    save(root, 2)
    return lambda: save(root, 2, "second"), ((2, "first"), (2, "second"))


def an_older_iteration_again(root):
    for iteration in (2, 4, 6):
        save(root, iteration)
    return lambda: save(root, 4, "second"), ((6, "first"), (4, "second"))


def a_damaged_iteration_again(root):
    save(root, 2)
    save(root, 4)
    (root / "iter_0000004" / "common.pt").write_text("half")
    return lambda: save(root, 4, "second"), ((2, "first"), (4, "second"))


def an_iteration_that_lets_others_go(root):
    for iteration in (2, 4, 6):
        save(root, iteration)
    return lambda: save(root, 8, retain=4), ((6, "first"), (8, "first"))


def an_iteration_after_a_death(root):
    save(root, 2)
    assert killed_at(4, lambda: save(root, 4))
    return lambda: save(root, 4, "second"), ((2, "first"), (4, "second"))


SAVES = [
    a_new_iteration,
    the_first_of_all,
    the_same_iteration_again,
    an_older_iteration_again,
    a_damaged_iteration_again,
    an_iteration_that_lets_others_go,
    an_iteration_after_a_death,
]


@pytest.mark.parametrize("prepare", SAVES, ids=lambda prepare: prepare.__name__)
def test_a_kill_at_any_step_of_a_save_leaves_a_whole_checkpoint(prepare, tmp_path):
    found, step, died = [], 0, True
    while died:
        root = tmp_path / str(step)
        root.mkdir()
        action, (old, new) = prepare(root)
        died = killed_at(step, action)
        found.append(loadable(root))
        assert found[-1] in (old, new)
        save(root, 10)
        assert loadable(root) == (10, "first")
        left = [p.name for p in (root / "moevement").iterdir() if p.suffix != ".json"]
        assert left == []
        assert not list((root / "moevement").glob("*.replaced.json"))
        step += 1
    assert step > 8
    assert (found[0], found[-1]) == (old, new)


def test_a_second_kill_while_the_first_is_mended_loses_nothing(tmp_path):
    """The first kill interrupts a replacement, the second what the next job does about it."""
    first, first_died = 0, True
    while first_died:
        second, second_died = 0, True
        while second_died:
            root = tmp_path / f"{first}-{second}"
            root.mkdir()
            save(root, 2)
            first_died = killed_at(first, lambda: save(root, 2, "second"))  # noqa: B023
            second_died = killed_at(second, lambda: CheckpointFolder(root).recover())  # noqa: B023
            assert loadable(root) in {(2, "first"), (2, "second")}
            second += 1
        first += 1


def flip(path):
    data = bytearray(path.read_bytes())
    data[random.Random(1).randrange(len(data))] ^= 1
    path.write_bytes(data)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


DAMAGES = {
    "a flipped bit in the tensors": lambda root: flip(root / "iter_0000004/__0_0.distcp"),
    "a flipped bit in the rest": lambda root: flip(root / "iter_0000004/common.pt"),
    "a truncated file": lambda root: truncate(root / "iter_0000004/__0_0.distcp"),
    "an empty file": lambda root: os.truncate(root / "iter_0000004/.metadata", 0),
    "a longer file": lambda root: (root / "iter_0000004/.metadata").open("a").write("x"),
    "a missing file": lambda root: (root / "iter_0000004/common.pt").unlink(),
    "a folder for a file": lambda root: (
        (root / "iter_0000004/common.pt").unlink(),
        (root / "iter_0000004/common.pt").mkdir(),
    ),
    "an empty folder": lambda root: (
        shutil.rmtree(root / "iter_0000004"),
        (root / "iter_0000004").mkdir(),
    ),
    "no list": lambda root: (root / "moevement/iter_0000004.json").unlink(),
    "half a list": lambda root: truncate(root / "moevement/iter_0000004.json"),
    "an empty list": lambda root: (root / "moevement/iter_0000004.json").write_text("{}"),
    "another list": lambda root: (root / "moevement/iter_0000004.json").write_text('{"files": 1}'),
    "a list of binary": lambda root: (root / "moevement/iter_0000004.json").write_bytes(
        b"\xff\x00"
    ),
    "the list of another": lambda root: shutil.copy(
        root / "moevement/iter_0000002.json", root / "moevement/iter_0000004.json"
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_told_and_the_checkpoint_before_it_is_whole(damage, tmp_path):
    save(tmp_path, 2)
    save(tmp_path, 4)
    DAMAGES[damage](tmp_path)
    reason = CheckpointFolder(tmp_path).damage(4)
    assert reason is not None
    assert len(reason.splitlines()) == 1
    assert loadable(tmp_path) == (2, "first")


def test_every_single_bit_counts(tmp_path):
    save(tmp_path, 2)
    path = tmp_path / "iter_0000002" / ".metadata"
    whole = path.read_bytes()
    for position in range(0, len(whole), 97):
        for bit in range(8):
            data = bytearray(whole)
            data[position] ^= 1 << bit
            path.write_bytes(data)
            assert CheckpointFolder(tmp_path).damage(2) is not None
    path.write_bytes(whole)
    assert CheckpointFolder(tmp_path).damage(2) is None


@pytest.mark.parametrize(
    ("tracker", "expected"),
    [
        (None, (6, "first")),
        ("", (6, "first")),
        ("garbage", (6, "first")),
        ("release", (6, "first")),
        ("99", (6, "first")),
        ("5", (4, "first")),
        ("4", (4, "first")),
        ("1", (6, "first")),
        ("6\n", (6, "first")),
    ],
)
def test_the_tracker_points_where_to_resume_and_never_to_nothing(tracker, expected, tmp_path):
    for iteration in (2, 4, 6):
        save(tmp_path, iteration)
    if tracker is None:
        (tmp_path / TRACKER).unlink()
    else:
        (tmp_path / TRACKER).write_text(tracker)
    assert loadable(tmp_path) == expected


def test_an_unreadable_tracker_is_as_none(tmp_path):
    save(tmp_path, 2)
    (tmp_path / TRACKER).write_bytes(b"\xff\xfe")
    assert loadable(tmp_path) == (2, "first")


def test_who_went_back_resumes_from_what_came_of_it(tmp_path):
    for iteration in (2, 4, 6):
        save(tmp_path, iteration)
    save(tmp_path, 4, "second")
    assert loadable(tmp_path) == (4, "second")
    assert CheckpointFolder(tmp_path).candidates() == [4, 2, 6]


def test_other_files_are_no_checkpoints(tmp_path):
    save(tmp_path, 2)
    for name in ("iter_4", "iter_000000x", "iter_0000008.bak", "events"):
        (tmp_path / name).mkdir()
    assert CheckpointFolder(tmp_path).iterations() == [2]
    assert CheckpointFolder(tmp_path / "none").iterations() == []
    assert loadable(tmp_path / "none") is None


def test_retention_keeps_multiples_and_the_newest(tmp_path):
    for iteration in range(1, 12):
        save(tmp_path, iteration, retain=4)
    assert CheckpointFolder(tmp_path).iterations() == [11, 8, 4]
    lists = sorted(path.name for path in (tmp_path / "moevement").iterdir())
    assert lists == [f"iter_{k:07d}.json" for k in (4, 8, 11)]


def test_an_abandoned_save_leaves_nothing(tmp_path):
    save(tmp_path, 2)
    folder = CheckpointFolder(tmp_path)
    write(folder.begin(4), 4, "never")
    folder.abandon(4)
    assert sorted(path.name for path in (tmp_path / "moevement").iterdir()) == ["iter_0000002.json"]
    folder.abandon(4)


def test_begin_gives_an_empty_folder_whatever_was_left(tmp_path):
    folder = CheckpointFolder(tmp_path)
    write(folder.begin(4), 4, "dead")
    write(folder.begin(6), 6, "dead")
    assert list(folder.begin(4).iterdir()) == []
    assert [p.name for p in (tmp_path / "moevement").iterdir()] == ["iter_0000004.writing"]


def test_an_atomic_write_that_dies_leaves_the_old_text(tmp_path):
    path = tmp_path / "file"
    step = 0
    path.write_text("old")
    while killed_at(step, lambda: write_atomically(path, "new")):
        assert path.read_text() == "old"
        step += 1
    assert step == 2  # before the temporary file, and before it takes the name
    assert path.read_text() == "new"


def test_a_manifest_lists_size_and_checksum_of_each_file(tmp_path):
    save(tmp_path, 2)
    files = json.loads((tmp_path / "moevement/iter_0000002.json").read_text())["files"]
    assert set(files) == {"common.pt", "__0_0.distcp", ".metadata"}
    assert files["common.pt"]["size_bytes"] == (tmp_path / "iter_0000002/common.pt").stat().st_size
    assert len(files["common.pt"]["xxh3_128"]) == 32
