# SPDX-License-Identifier: Apache-2.0
"""A disk without room is told about at start; once a job trains, it ends nothing."""

import re
import subprocess
from mmap import PAGESIZE
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_moevement.training.checkpoints import TRACKER, CheckpointFolder
from tests.harness.bad_input import refusal, run_tiny, small_disk, tree
from tests.harness.log_lines import log_lines

pytestmark = pytest.mark.distributed

SPARE_BYTES = 16 << 20
ASYNC = ("--async-save",)
WORLD_SIZES = [pytest.param(1, marks=pytest.mark.slow), 2]
"""Two ranks show more than one does."""


def goes_on_after_failed_saves(server, argv, folder, whole, failed, world_size, limit_bytes=None):
    """Asserts that training ends well, each failed save is one line, older ones are whole."""
    result = server.run(run_tiny, world_size=world_size, args=[argv, limit_bytes]).check()
    assert result.values == (0,) * world_size
    told = "".join(rank.stderr for rank in result.ranks)
    lines = [line.text for line in log_lines(told) if line.level == "WARNING"]
    assert re.findall(r"^no checkpoint of iteration (\d+): .+$", "\n".join(lines), re.M) == failed
    assert len(lines) == len(failed), told
    assert re.search(r" INFO pretrain_moe.py: done: iteration (\d+) of \1 is trained\n$", told)
    checkpoints = CheckpointFolder(Path(folder))
    assert checkpoints.iterations() == whole
    assert [checkpoints.damage(k) for k in whole] == [None] * len(whole)
    assert (Path(folder) / TRACKER).read_text().strip() == str(whole[0])
    assert not list((Path(folder) / "moevement").glob("*.writing"))


def asked_bytes(checkpoint):
    """Returns what a start asks for: weights, masters and two moments, and room for the rest.

    A page of it is for the file that names the history of training.
    """
    metadata = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = [one for one in metadata.values() if isinstance(one, TensorStorageMetadata)]
    in_fp32_masters_are_the_weights = sum(one.size.numel() * 4 for one in tensors)
    return in_fp32_masters_are_the_weights * 4 // 3 + SPARE_BYTES + PAGESIZE


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_disk_without_room_for_one_checkpoint_is_refused_at_start(
    world_size, saved, megatron_fork_server, tmp_path
):
    argv = ["--save", str(tmp_path), "--save-interval", "2"]
    with small_disk(tmp_path, asked_bytes(saved / "iter_0000002") - 2 * PAGESIZE):
        line = refusal(megatron_fork_server, argv, world_size)
        assert list(tree(tmp_path)) == [tmp_path / "moevement"]
    assert f"--save {tmp_path} has no room for a checkpoint: " in line


@pytest.mark.slow
def test_what_a_dead_save_left_and_a_job_at_its_end_need_no_room(
    saved, megatron_fork_server, tmp_path
):
    left = tmp_path / "moevement" / "iter_0000003.writing"
    argv = ["--save", str(tmp_path), "--exit-interval", "1"]
    with small_disk(tmp_path, asked_bytes(saved / "iter_0000002")):
        left.mkdir(parents=True)
        (left / "__0_0.distcp").write_bytes(bytes(1 << 20))
        result = megatron_fork_server.run(run_tiny, world_size=1, args=[argv]).check()
        assert result.values == (0,)
        assert CheckpointFolder(tmp_path).iterations() == [1]
        (tmp_path / "file").write_bytes(bytes(1 << 20))
        argv = ["--save", str(tmp_path), "--load", str(tmp_path), "--train-iters", "1"]
        argv += ["--override-opt-param-scheduler"]
        result = megatron_fork_server.run(run_tiny, world_size=1, args=[argv]).check()
        assert result.values == (0,)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_digest_that_does_not_fit_on_the_disk_is_told_in_one_line(
    world_size, megatron_fork_server, tmp_path
):
    digest = tmp_path / "digest.json"
    argv = ["--moevement-state-digest", str(digest), "--train-iters", "1"]
    with small_disk(tmp_path, 1 << 16):
        (tmp_path / "file").write_bytes(bytes(1 << 16))
        line = refusal(megatron_fork_server, argv, world_size)
        assert list(tree(tmp_path)) == [tmp_path / "file"]
    assert f"--moevement-state-digest {digest}: " in line
    assert "No space left" in line


WAYS = [
    pytest.param(1, (), id="1"),
    pytest.param(2, (), id="2"),
    pytest.param(2, ASYNC, id="async"),
]


@pytest.mark.parametrize(("world_size", "flags"), WAYS)
def test_a_full_disk_fails_the_save_and_not_the_training(
    world_size, flags, saved, megatron_fork_server, tmp_path
):
    argv = ["--save", str(tmp_path), "--save-interval", "2", "--train-iters", "6", *flags]
    with small_disk(tmp_path, asked_bytes(saved / "iter_0000002")):
        goes_on_after_failed_saves(
            megatron_fork_server, argv, tmp_path, [2], ["4", "6", "6"], world_size
        )


@pytest.mark.parametrize(("world_size", "flags"), WAYS)
@pytest.mark.parametrize("limit_bytes", [16384, 65536])  # the log is a file, too
def test_a_write_that_fails_halfway_leaves_the_checkpoints_before_it(
    limit_bytes, world_size, flags, saved, megatron_fork_server, tmp_path
):
    folder = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(saved), str(folder)], check=True)
    argv = ["--load", str(folder), "--save", str(folder), "--save-interval", "2"]
    argv += ["--train-iters", "6", "--override-opt-param-scheduler", "--no-load-rng", *flags]
    goes_on_after_failed_saves(
        megatron_fork_server, argv, folder, [4, 2], ["6", "6"], world_size, limit_bytes
    )
