# SPDX-License-Identifier: Apache-2.0
"""Parts of tiers: written beside training, whole or of no use, and read back to the same bytes."""

import contextlib
import dataclasses

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.policy.tiers.tier import Manifest, TierName
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.slots.ring_file import RingFile
from megatron_moevement.runtime.tiers import target as targets
from megatron_moevement.runtime.tiers.manifests import (
    parts_there,
    read_manifest,
    write_manifest,
)
from megatron_moevement.runtime.tiers.part import (
    DamagedPartError,
    LostSlotError,
    check_slots,
    load_slots,
    read_part,
    write_part,
)
from megatron_moevement.runtime.tiers.target import open_target

from .conftest import IDENTITY, OWNER, WINDOW, fill, named, slots_of, told

LOSSES = b"what a journal has"


@pytest.mark.parametrize("place", ["s3://another", "s3://another/folder"])
def test_a_bucket_that_is_not_there_is_not_made(object_store, place):
    target = open_target(place, "run-1")
    with pytest.raises(FileNotFoundError), target.create("folder/name"):
        pass
    assert object_store.system.ls("") == []


def write(target, ring, name=None, window=WINDOW, proceed=lambda: None):
    return write_part(
        *(target, slots_of(ring, name, window)),
        await_slot=lambda step: None,
        await_persisted=lambda: (told(), [LOSSES[:3], LOSSES[3:]]),
        proceed=proceed,
    )


def empty_copy(ring, folder):
    return RingFile.create(folder / "copy.ring", IDENTITY, OWNER, ring.shape)


def test_a_part_comes_back_with_every_byte(target, full, shared_memory):
    part = read_part(target, named(), write(target, full))
    assert (part.told, part.owner, part.identity) == (told(), OWNER, IDENTITY)
    with contextlib.closing(empty_copy(full, shared_memory)) as copy:
        assert load_slots(target, named(), part, copy, rollbacks=8) == LOSSES
        for record, original in zip(copy.records(), full.records(), strict=True):
            assert dataclasses.replace(record, rollbacks=3) == original
            assert record.rollbacks == 8
            assert copy.damaged_parts(record) == ()


def test_files_are_ours_alone(tmp_path, full):
    write(open_target(str(tmp_path / "tiers"), "run-1"), full)
    files = [path for path in (tmp_path / "tiers").rglob("*") if path.is_file()]
    assert len(files) == 2
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert {path.parent.stat().st_mode & 0o777 for path in files} == {0o700}


@pytest.mark.parametrize("place", ["slots", "json"])
def test_a_part_with_one_wrong_byte_is_none(tmp_path, full, shared_memory, place):
    target = open_target(str(tmp_path / "tiers"), "run-1")
    name = write(target, full)
    (path,) = (tmp_path / "tiers").rglob(f"*.{place}")
    sizes = path.stat().st_size
    for offset in (0, sizes // 2, sizes - 1):
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)
        with (
            contextlib.closing(empty_copy(full, shared_memory)) as copy,
            pytest.raises(DamagedPartError),
        ):
            load_slots(target, named(), read_part(target, named(), name), copy, rollbacks=8)
        with pytest.raises(DamagedPartError):
            check_slots(target, named(), read_part(target, named(), name))
        data[offset] ^= 1
        path.write_bytes(data)
    check_slots(target, named(), read_part(target, named(), name))
    path.write_bytes(bytes(data[:-1]))
    with pytest.raises(DamagedPartError):
        check_slots(target, named(), read_part(target, named(), name))
    with (
        contextlib.closing(empty_copy(full, shared_memory)) as copy,
        pytest.raises(DamagedPartError),
    ):
        load_slots(target, named(), read_part(target, named(), name), copy, rollbacks=8)


def test_a_description_or_manifest_with_one_wrong_byte_is_none(tmp_path, full):
    target = open_target(str(tmp_path / "tiers"), "run-1")
    part = write(target, full)
    write_manifest(target, Manifest(named(), WINDOW, (part,)))
    for path, read in (
        (next((tmp_path / "tiers").rglob("*.json")), lambda: read_part(target, named(), part)),
        (next((tmp_path / "tiers").rglob("*.manifest")), lambda: read_manifest(target, named())),
    ):
        read()
        whole = path.read_bytes()
        for offset in range(len(whole)):
            path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
            with pytest.raises(DamagedPartError):
                read()
        path.write_bytes(whole[:-1])
        with pytest.raises(DamagedPartError):
            read()


def test_a_file_has_its_name_when_all_of_it_is_there(tmp_path):
    target = open_target(str(tmp_path / "tiers"), "run-1")
    with target.create("tier/part") as file:
        file.write(b"12")
        assert target.names("tier") == []
    assert target.names("tier") == ["part"]
    with pytest.raises(RuntimeError), target.create("tier/other") as file:
        raise RuntimeError
    assert [path.name for path in (tmp_path / "tiers" / "run-1" / "tier").iterdir()] == ["part"]


def test_slots_that_nothing_describes_do_not_stay(target, full):
    create = target.create

    def refuse(name):
        if name.endswith(".json"):
            raise OSError(28, "No space left on device")
        return create(name)

    target.create = refuse
    with pytest.raises(OSError, match="No space"):
        write(target, full)
    assert target.names(str(named())) == []


@pytest.mark.parametrize("pieces", range(6))
def test_a_slot_that_training_overwrites_meanwhile_is_given_up(target, full, pieces):
    """Before each piece: those that were read before are of the window, the others are not."""
    passed = []

    def overwrite():
        if len(passed) == pieces:
            for step in (4, 5, 6):  # S_5 takes the room of S_2
                fill(full, step, byte=70 + step)
        passed.append(None)

    with pytest.raises(LostSlotError, match="overwritten before it was read"):
        write(target, full, proceed=overwrite)
    assert parts_there(target, named()) == []
    assert [name for name in target.names(str(named())) if name.endswith(".slots")] == []


def test_a_damaged_slot_is_not_written(target, full):
    full.payload(full.held(3))[60] ^= 1
    with pytest.raises(LostSlotError, match="head in the slot of step 3 is damaged in memory"):
        write(target, full)
    assert parts_there(target, named()) == []


@pytest.mark.parametrize(
    ("name", "window"), [(TierName(4, 5, "0" * 16), WINDOW), (None, Window(2, 2, 1))]
)
def test_slots_of_another_history_are_not_written(target, full, name, window):
    with pytest.raises(LostSlotError):
        write(target, full, name, window)


def test_a_url_that_nothing_reads_is_an_error():
    with pytest.raises(UserError, match="--moevement-tier-dir nothing://x"):
        open_target("nothing://x", "run-1")


def test_a_folder_in_which_another_user_may_rename_is_refused(tmp_path, full):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(UserError, match=targets.FLAG):
        open_target(str(folder), "run-1")
    folder.chmod(0o700)
    target = open_target(str(folder), "run-1")
    folder.chmod(0o777)
    with pytest.raises(UserError, match=targets.FLAG):
        write(target, full)
