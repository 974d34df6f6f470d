# SPDX-License-Identifier: Apache-2.0
"""What a relaunch knows of faults that struck before."""

import contextlib
import os

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.runtime.stores.cleaning import clean
from megatron_moevement.runtime.stores.fault_record import FaultRecord, KnownFaults, forget_rank

NOTHING = KnownFaults(None, frozenset())


def record(root, rank):
    return contextlib.closing(FaultRecord(root, "run", rank))


def test_the_next_launch_reads_what_all_ranks_wrote(tmp_path):
    with record(tmp_path, 0) as first, record(tmp_path, 1) as second:
        assert first.read() == NOTHING
        second.begin(20.0)
        first.begin(10.0)
        first.note("kill:7:barrier@0")
        second.note("stop:9:commit@1")
    with record(tmp_path, 2) as spare:
        assert spare.read() == KnownFaults(10.0, frozenset({"kill:7:barrier@0", "stop:9:commit@1"}))


def test_a_line_that_was_cut_is_none(tmp_path):
    with record(tmp_path, 0) as one:
        one.note("kill:7:barrier")
        path = one.folder / "rank-0"
        path.write_text(path.read_text() + '{"struck": "kill:8')
        assert one.read().struck == {"kill:7:barrier"}


def test_it_goes_with_the_last_rank(tmp_path):
    with record(tmp_path, 0) as first, record(tmp_path, 1) as second:
        forget_rank(tmp_path, "run", 0)
        assert second.folder.is_dir()
        assert not (first.folder / "rank-0").exists()
        forget_rank(tmp_path, "run", 1)
    assert list(tmp_path.iterdir()) == []
    forget_rank(tmp_path, "run", 1)


def test_it_is_this_users_alone(tmp_path):
    with record(tmp_path, 0) as one:
        assert one.folder.stat().st_mode & 0o777 == 0o700
        assert (one.folder / "rank-0").stat().st_mode & 0o777 == 0o600
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "faults").symlink_to(tmp_path)
    with pytest.raises(UserError, match="is another user's"):
        FaultRecord(tmp_path, "other", 0)


def test_a_folder_that_can_not_be_made_is_told(tmp_path):
    (tmp_path / "run").write_text("no folder")
    with pytest.raises(UserError, match="give another --moevement-store-dir"):
        FaultRecord(tmp_path, "run", 0)


def test_clean_removes_it_unless_a_process_uses_it(tmp_path):
    with record(tmp_path, 0) as one:
        assert clean(tmp_path, None).removed == {}
        assert one.folder.is_dir()
    assert clean(tmp_path, "another").removed == {}
    assert list(clean(tmp_path, None).removed) == [tmp_path / "run" / "faults"]
    assert list(tmp_path.iterdir()) == []


def test_no_descriptor_stays_open(tmp_path):
    before = os.listdir("/proc/self/fd")
    with record(tmp_path, 0) as one:
        one.note("kill:7:barrier")
    assert os.listdir("/proc/self/fd") == before
