# SPDX-License-Identifier: Apache-2.0
"""The machine as a check sees it: room for files, memory, and memory that may be locked."""

import os
import resource

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.runtime.observation.machine import lockable_bytes, look_at_machine
from tests.harness.bad_input import small_disk

WITHOUT = "Name:\tx\nCapEff:\t00000000a80425fb\n"
WITH = "Name:\tx\nCapEff:\t00000000a80465fb\n"
"""Capabilities of a container, as the kernel lists them, the second with CAP_IPC_LOCK."""


def test_what_may_be_locked_is_the_soft_limit_of_the_process(tmp_path):
    status = tmp_path / "status"
    status.write_text(WITHOUT)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, hard))
    try:
        assert lockable_bytes(status) == 64 << 10
        status.write_text(WITH)
        assert lockable_bytes(status) is None
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def test_files_of_the_run_that_are_there_count_as_room(tmp_path):
    with small_disk(tmp_path, 64 << 20):
        root = tmp_path / "store"  # not there yet
        before = look_at_machine(root, "run")
        assert (before.store_dir, before.files_in_memory) == (str(root), True)
        assert before.file_bytes <= 64 << 20
        folder = root / "run" / "process-3"
        folder.mkdir(parents=True)
        descriptor = os.open(folder / "journal", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(descriptor, 0, 16 << 20)
        os.close(descriptor)
        assert look_at_machine(root, "run").file_bytes == before.file_bytes
        assert look_at_machine(root, "another").file_bytes == before.file_bytes - (16 << 20)


def test_a_disk_is_no_memory(tmp_path):
    assert not look_at_machine(tmp_path, "run").files_in_memory


@pytest.mark.parametrize("below", ["", "/store"])
def test_a_store_directory_that_can_not_be_made_is_refused(tmp_path, below):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"is no folder .* --moevement-store-dir"):
        look_at_machine(tmp_path / f"file{below}", "run")


def test_a_store_directory_that_others_may_rename_is_refused(tmp_path):
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(UserError, match=f"every user may write in {root}"):
        look_at_machine(root, "run")
