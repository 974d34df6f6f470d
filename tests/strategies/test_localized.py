"""A stage that is lost replays from its neighbours' logs; the others stand by and keep their bits."""

import dataclasses

import pytest

from megatron_moevement.testing.combinations import ALWAYS, Combination
from megatron_moevement.testing.fork_server import OnRankFailure
from megatron_moevement.testing.random_text import data_flags

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

UNTIED = "--untie-embeddings-and-output-weights"
W = 3
TRAIN_ITERS = 11
TARGET = 9
"""Behind a persisted window: the ring has no room for a tenth slot otherwise."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What is trained, and how many stages, chunks of each and micro-batches that makes."""

    world_size: int
    stages: int
    chunks: int
    micro_batches: int
    flags: tuple[str, ...]


def job_of(levels, stages, chunks, micro_batches, *flags):
    combination = Combination.of(levels)
    flags = (*ALWAYS, *combination.flags, *flags)
    return Job(combination.world_size, stages, chunks, micro_batches, flags)


PP2 = dataclasses.replace(
    job_of("pp2-ep2 bf16 replicated", 2, 1, 6, UNTIED, "--expert-model-parallel-size=1"),
    world_size=2,
)
JOBS = {"pp2": PP2}


def interruptions(world_size, **others):
    """Returns where each rank leaves its training: with step T committed, unless others say."""
    places = dict.fromkeys(map(str, range(world_size)), f"{TARGET}:gather")
    return places | {name.removeprefix("rank"): place for name, place in others.items()}


def run(server, job, text, folder, restarts=()):
    from megatron_moevement.testing.restart_run import train_through  # noqa: PLC0415

    protection = (
        "--moevement-strategy=moevement",
        f"--moevement-window={W}",
        "--moevement-replicas=1",
        f"--moevement-store-dir={folder}/store",
        f"--moevement-event-dir={folder}/events",
        "--moevement-run-id=test",
    )
    flags = [
        *job.flags,
        *data_flags(text),
        f"--train-iters={TRAIN_ITERS}",
        f"--data-cache-path={folder}/index",
        "--moevement-no-progress-bar",
        *(protection if restarts else ()),
    ]
    result = server.run(
        train_through, world_size=job.world_size, args=[flags, list(restarts)], timeout_s=60, on_rank_failure=OnRankFailure.STOP_JOB
    )
    return result.check().values


def test_smallest(megatron_fork_server, text, tmp_path):
    plain = run(megatron_fork_server, PP2, text, tmp_path / "plain")
    restart = {"places": interruptions(2), "lost": [0]}
    found = run(megatron_fork_server, PP2, text, tmp_path / "lost", [restart])
    from megatron_moevement.runtime.events import read_events

    for e in read_events(tmp_path / "lost" / "events"):
        if e.event.value in ("plan", "replay", "recovered"):
            print(e.logical_rank, e.iteration, e.event.value, e.fields)
    for a, b in zip(plain, found):
        print(a["passes"], b["passes"])
        assert a["digests"] == b["digests"]
        assert a["losses"] == b["losses"]
