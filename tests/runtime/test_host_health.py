# SPDX-License-Identifier: Apache-2.0
"""A process finds out that its machine does not serve it."""

import errno
import os

import pytest

from megatron_moevement.runtime.observation.host_health import HostHealth, UnhealthyError


def test_a_machine_with_memory_and_folders_is_healthy_and_nothing_stays(tmp_path):
    HostHealth(tmp_path, tmp_path, tmp_path / "to" / "be" / "made").check()
    HostHealth(None, tmp_path / "store", None).check()
    assert os.listdir(tmp_path) == []


def test_too_little_memory(tmp_path):
    with pytest.raises(UnhealthyError, match=r"only \d+ MiB of memory are available"):
        HostHealth(tmp_path, tmp_path, None, least_memory_bytes=1 << 50).check()


def test_the_store_is_gone_and_another_one_could_be_made(tmp_path):
    with pytest.raises(UnhealthyError, match=r"its store .*can't be written: No such file"):
        HostHealth(tmp_path / "process-1", tmp_path, None).check()


@pytest.mark.parametrize("name", ["root", "save"])
def test_a_folder_that_can_not_be_written(tmp_path, name):
    (tmp_path / "file").write_text("")
    folders = {"root": None, "save": None} | {name: tmp_path / "file"}
    with pytest.raises(UnhealthyError, match=r"--(moevement-store-dir|save) .*Not a directory"):
        HostHealth(None, **folders).check()


class FullFolder:
    """A folder of a file system that has no room for another file."""

    def exists(self):
        return True

    def __truediv__(self, name):
        return FullFolder()

    def open(self, mode):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_of_checkpoints_says_nothing_of_this_machine_and_a_full_store_does():
    HostHealth(None, None, FullFolder()).check()
    with pytest.raises(UnhealthyError, match="No space left"):
        HostHealth(FullFolder(), None, None).check()
