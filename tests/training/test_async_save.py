# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that is written beside training is that of its step, and has its name when whole."""

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from megatron_moevement.training.checkpoints import CheckpointFolder
from tests.harness.tiny_job import tiny_job

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

VISIBLE = ("iteration", "checkpoint_begun", "checkpoint_saved")
LAYOUT = ("--expert-model-parallel-size=2", "--use-distributed-optimizer", "--bf16")
"""Each rank writes something of its own."""
SAVED = 3
TRAIN_ITERS = 7
WAITED = "the save before this one is still being written"
UNTIL_AWAITED = 0


def train(folder, flags, holds=None, awaited_in=None, copies=True, signal_in=None):
    """Trains a job; returns what this process did, in order, and the state that it came to.

    Args:
        holds: by rank the step that must have begun before it writes the first checkpoint, or
            `UNTIL_AWAITED`: the job waits for it.
        awaited_in: the step that waits until that is written by this rank.
        copies: whether a checkpoint is written from a copy; otherwise from the state itself.
        signal_in: the step in which each rank sends itself SIGTERM.
    """
    from megatron_moevement.runtime.coordination.generation import Generation  # noqa: PLC0415
    from megatron_moevement.training import checkpoint_saving  # noqa: PLC0415
    from megatron_moevement.training.loop import train as run_loop  # noqa: PLC0415
    from megatron_moevement.training.resident import Resident  # noqa: PLC0415
    from megatron_moevement.training.stop_request import StopSources  # noqa: PLC0415
    from tests.harness.held_write import (  # noqa: PLC0415
        await_end,
        hold_first_write,
        steps_begun,
    )

    reporting = [f"--moevement-event-dir={folder}/events", "--log-interval=1"]
    stop = StopSources(None)
    with tiny_job(*reporting, f"--save={folder}/save", *flags) as job, stop.listening():
        hold, over = (holds or {}).get(str(dist.get_rank())), []

        def in_step(step):
            if step == awaited_in:
                await_end(over)
            if step == signal_in:
                os.kill(os.getpid(), signal.SIGTERM)

        begun = steps_begun(job, in_step)
        if hold is not None:
            over = hold_first_write(begun, None if hold == UNTIL_AWAITED else hold)
        if not copies:
            checkpoint_saving.CopiedData = lambda part, data: data
        with Generation() as generation:
            run_loop(job, stop, Resident(job.arguments, job.backend), generation)
        return [events(folder), job.digests()]


def events(folder):
    from megatron_moevement.runtime.observation.events import read_events  # noqa: PLC0415

    return [
        f"{one.event.value} {one.iteration}"
        for one in read_events(f"{folder}/events")
        if one.pid == os.getpid() and one.event.value in VISIBLE
    ]


def outcome(server, folder, *flags, layout=LAYOUT, **options):
    """Returns what all ranks did, which is the same, what they came to, and rank 0's lines."""
    names = ("holds", "awaited_in", "copies", "signal_in")
    given = dict.fromkeys(names) | {"copies": True} | options
    flags = [*layout, f"--train-iters={TRAIN_ITERS}", *flags]
    args = [str(folder), flags, *(given[n] for n in names)]
    result = server.run(train, world_size=2, args=args).check()
    (done, _), (others, _) = result.values
    assert done == others
    return done, [state for _, state in result.values], result.ranks[0].stderr


def iterations(first, last):
    return [f"iteration {number}" for number in range(first, last + 1)]


def checkpoint(folder, iteration=SAVED):
    return Path(folder) / "save" / f"iter_{iteration:07d}"


ASYNC = ("--async-save", f"--save-interval={SAVED}")


@pytest.fixture(scope="module")
def at_once(megatron_fork_server, tmp_path_factory):
    """A job that saves before it goes on."""
    folder = tmp_path_factory.mktemp("at-once")
    _, states, _ = outcome(megatron_fork_server, folder, f"--save-interval={SAVED}")
    return folder, states


@pytest.fixture(scope="module")
def beside(megatron_fork_server, tmp_path_factory):
    """A job that writes while it trains: one rank two steps later, the other in the third."""
    folder = tmp_path_factory.mktemp("beside")
    holds = {"0": SAVED + 2, "1": SAVED + 3}
    options = {"holds": holds, "awaited_in": SAVED + 3}
    return folder, *outcome(megatron_fork_server, folder, *ASYNC, **options)


def test_training_goes_on_and_the_name_comes_when_all_ranks_have_written(beside):
    _, done, _, told = beside
    assert WAITED not in told
    assert done == [
        *(*iterations(1, SAVED), f"checkpoint_begun {SAVED}"),
        *(*iterations(SAVED + 1, SAVED + 3), f"checkpoint_saved {SAVED}"),
        *(f"checkpoint_begun {2 * SAVED}", *iterations(TRAIN_ITERS, TRAIN_ITERS)),
        *(f"checkpoint_saved {2 * SAVED}", f"checkpoint_saved {TRAIN_ITERS}"),
    ]


def files_of(folder):
    return {path.name: path.read_bytes() for path in checkpoint(folder).glob("*.distcp")}


def test_it_has_the_bytes_of_one_that_is_written_at_once(at_once, beside):
    expected, found = at_once[0], beside[0]
    assert files_of(found) == files_of(expected)
    assert all(len(each) > 1 << 14 for each in files_of(found).values())
    one, other = (FileSystemReader(checkpoint(each)).read_metadata() for each in (expected, found))
    assert one.state_dict_metadata == other.state_dict_metadata
    assert one.storage_data == other.storage_data
    for name in ("common.pt", "metadata.json"):
        one, other = ((checkpoint(each) / name).read_bytes() for each in (expected, found))
        assert one == other
    folder = CheckpointFolder(found / "save")
    assert [folder.damage(each) for each in folder.iterations()] == [None] * 3
    names = {path.name for path in checkpoint(found).iterdir()}
    assert names == set(folder.manifest(SAVED))


def test_so_has_one_of_an_optimizer_whose_state_is_whole_on_each_rank(
    megatron_fork_server, tmp_path
):
    layout = ("--pipeline-model-parallel-size=2", "--bf16")
    at_once, beside = tmp_path / "at-once", tmp_path / "beside"
    outcome(megatron_fork_server, at_once, f"--save-interval={SAVED}", layout=layout)
    holds = {"0": SAVED + 2, "1": SAVED + 2}
    outcome(megatron_fork_server, beside, *ASYNC, holds=holds, layout=layout)
    assert files_of(beside) == files_of(at_once)


def test_without_the_copy_it_would_have_bytes_of_later_steps(
    megatron_fork_server, at_once, tmp_path
):
    holds = {"0": SAVED + 2, "1": SAVED + 2}
    outcome(megatron_fork_server, tmp_path, *ASYNC, holds=holds, copies=False)
    assert files_of(tmp_path) != files_of(at_once[0])


def test_a_job_goes_on_from_it_to_the_same_bits(megatron_fork_server, at_once, beside, tmp_path):
    _, expected = at_once
    folder, _, states, _ = beside
    assert states == expected
    flags = (f"--load={folder}/save", f"--ckpt-step={SAVED}")
    done, resumed, _ = outcome(megatron_fork_server, tmp_path, *flags)
    assert done[:1] == iterations(SAVED + 1, SAVED + 1)
    assert resumed == expected


def test_a_save_waits_for_the_one_before_with_a_line(megatron_fork_server, tmp_path):
    flags = ("--async-save", "--save-interval=1", "--train-iters=2")
    done, _, told = outcome(megatron_fork_server, tmp_path, *flags, holds={"1": UNTIL_AWAITED})
    assert done == [
        *("iteration 1", "checkpoint_begun 1"),
        *("iteration 2", "checkpoint_saved 1", "checkpoint_begun 2", "checkpoint_saved 2"),
    ]
    assert told.count(WAITED) == 1


def test_a_signal_ends_a_job_with_what_it_writes_and_with_its_last_state(
    megatron_fork_server, tmp_path
):
    holds = {"0": UNTIL_AWAITED, "1": UNTIL_AWAITED}
    done, _, _ = outcome(megatron_fork_server, tmp_path, *ASYNC, holds=holds, signal_in=SAVED + 1)
    last = SAVED + 2  # the step after the signal carries it to all
    assert done[SAVED:] == [
        f"checkpoint_begun {SAVED}",
        *iterations(SAVED + 1, last),
        *(f"checkpoint_saved {SAVED}", f"checkpoint_saved {last}"),
    ]
    folder = CheckpointFolder(tmp_path / "save")
    assert (folder.latest(), folder.iterations()) == (last, [last, SAVED])


def give_up(folder):
    """Gives a write up in its first item, which takes long; returns what came of it."""
    import threading  # noqa: PLC0415

    from megatron_moevement.training.background_write import BackgroundWrite  # noqa: PLC0415

    entered, leave, asked = threading.Event(), threading.Event(), []
    with tiny_job(f"--save={folder}") as job:
        begun, data = job.checkpoints.begin(1, {})

        class Slow:
            def resolve_data(self, item):
                asked.append(item)
                entered.set()
                leave.wait()
                return data.resolve_data(item)

        write = BackgroundWrite(begun, Slow())
        entered.wait()
        write.close()  # does not wait for a disk that hangs
        was_over = write.is_over
        leave.set()
        write.wait(lambda: None)
        try:
            write.take()
        except Exception as error:  # noqa: BLE001  (returned)
            return [was_over, type(error).__name__, len(asked), len(begun.part.plan.items) > 1]


def test_a_write_that_is_given_up_ends_before_its_next_item(megatron_fork_server, tmp_path):
    job = megatron_fork_server.run(give_up, world_size=1, args=[str(tmp_path)])
    assert job.check().values == ([False, "GivenUpError", 1, True],)
    assert CheckpointFolder(tmp_path).iterations() == []
