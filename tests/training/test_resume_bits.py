# SPDX-License-Identifier: Apache-2.0
"""A run that is stopped and resumed ends with the bits of one that is not.

One test body over combinations of layout, precision, optimizer, experts and the rest. A few run by
default; a set in which every two settings meet is marked slow and runs by one command:

    ./scripts/resume_campaign.sh
"""

import contextlib
import dataclasses
import functools
import shutil
import signal
import time
from pathlib import Path
from random import Random

import psutil
import pytest

from megatron_moevement.runtime.observation.events import EventName, read_events
from megatron_moevement.training.checkpoints import CheckpointFolder
from tests.harness.combinations import CLIP_GRAD, Combination, cover
from tests.harness.default_run import slow_but
from tests.harness.interruption import (
    Program,
    Run,
    Stop,
    digest_differences,
    kill_all,
    send,
)
from tests.harness.random_text import data_flags, prepare_random_text

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).parents[2] / "pretrain_moe.py"
TRAIN_ITERS = 6

CONTROL = Combination.of("tp2 fp32 seq-aux recomputed evaluation")
"""With dropout, and without overflows that skip a step."""
OVERLAPPED = Combination.of("pp2-ep2 bf16 distributed-overlap grouped global-aux linear")
EXAMPLES = {
    Combination.of("vpp2 fp16 replicated grouped"): (Stop.SIGKILL, Stop.SIGTERM),
    Combination.of("pp2-ep2 bf16 distributed grouped"): (Stop.NEVER,),
    Combination.of("edp3 fp16 distributed bias"): (Stop.SIGTERM,),
    CONTROL: (Stop.EXIT_INTERVAL,),
    OVERLAPPED: (Stop.SIGKILL,),
    Combination.of("pp2-dp2-ep2 bf16 replicated-overlap allgather seq-aux"): (Stop.SIGKILL,),
}
"""What runs by default, and how each is stopped; small jobs in more ways than large ones."""
COVER = cover()


OURS = ("--num-workers=1", "--save-interval=2", "--moevement-no-progress-bar")


EXAMPLE_PARAMETERS = [pytest.param(one, id=one.name) for one in EXAMPLES]
COVER_PARAMETERS = [
    pytest.param(one, id=f"cover{number:02}-{one.name}", marks=pytest.mark.slow)
    for number, one in enumerate(COVER)
]
STOPPED_EXAMPLES = [
    pytest.param(one, stop, id=f"{one.name}-{stop.value}")
    for one, stops in EXAMPLES.items()
    for stop in stops
]
STOPPED_COVER = [
    pytest.param(one, stop, id=f"cover{number:02}-{one.name}-{stop.value}", marks=pytest.mark.slow)
    for number, one in enumerate(COVER)
    for stop in Stop
]


@dataclasses.dataclass(frozen=True)
class Uninterrupted:
    """What a run from start to end left: its digest, and what rank 0 said of each step."""

    digest: dict
    steps: list

    @classmethod
    def of(cls, run):
        digest = run.finish()
        events = [event for event in read_events(run.events) if event.logical_rank == 0]
        return cls(digest, [one.fields for one in events if one.event is EventName.ITERATION])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Returns the prefix of random text: no two samples of it are the same."""
    return prepare_random_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def program(megatron_fork_server, text):
    """Returns the program with the flags of a combination."""

    def of(combination, *flags, train_iters=TRAIN_ITERS):
        flags = (*combination.flags, *OURS, *data_flags(text), *flags)
        return Program(megatron_fork_server, PROGRAM, combination.world_size, train_iters, flags)

    return of


@pytest.fixture(scope="module")
def uninterrupted(program, tmp_path_factory):
    """Returns the run from start to end of a combination; one of each is enough."""

    @functools.cache
    def run(combination):
        folder = tmp_path_factory.mktemp("uninterrupted")
        result = Uninterrupted.of(Run(program(combination), folder))
        shutil.rmtree(folder)
        return result

    return run


@pytest.mark.parametrize(("combination", "stop"), [*STOPPED_EXAMPLES, *STOPPED_COVER])
def test_a_stopped_and_resumed_run_has_the_bits_of_an_uninterrupted_one(
    program, uninterrupted, tmp_path, combination, stop
):
    expected = uninterrupted(combination).digest
    run = Run(program(combination), tmp_path)
    if stop is not Stop.NEVER:
        run.stop_on_the_way(stop, Random(f"{combination.name} {stop.value}"))
    assert digest_differences(run.finish(), expected) == []


@pytest.mark.parametrize("combination", [*EXAMPLE_PARAMETERS, *COVER_PARAMETERS])
def test_the_uninterrupted_run_clips_warms_up_and_skips_what_overflows(uninterrupted, combination):
    result = uninterrupted(combination)
    steps = result.steps
    assert result.digest["iteration"] == len(result.digest["loss"]) == len(steps) == TRAIN_ITERS
    assert any(float(step["grad_norm"] or 0) > CLIP_GRAD for step in steps if not step["skipped"])
    applied = [step["learning_rate"] for step in steps if not step["skipped"]]
    assert len(set(applied)) == len(applied) > 1
    assert applied[0] < applied[1]
    if "fp16" in combination.levels:
        assert 0 < len(applied) < len(steps)
    else:
        assert len(applied) == len(steps)


BUCKETS = "--ddp-bucket-size=3001"
"""Divisible by nothing: buckets of dense parameters and of experts end in padding."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "levels",
    [
        "edp3 bf16 distributed-overlap",
        "edp3 fp32 distributed-overlap grouped bias",
        "pp2-ep2 bf16 distributed-overlap grouped",
        "ep2-edp3 fp16 distributed-overlap",
    ],
)
def test_a_run_with_several_buckets_resumes_where_it_was(program, tmp_path, levels):
    job = program(Combination.of(levels), BUCKETS)
    whole, stopped = Run(job, tmp_path / "whole"), Run(job, tmp_path / "stopped")
    expected = whole.finish()
    assert digest_differences(whole.finish(), expected) == []  # loads, and does no step
    assert stopped.finish("--exit-interval=4")["iteration"] == 4
    assert digest_differences(stopped.finish(), expected) == []


BARE_STAGES = {
    "first-bf16": ("pp2-ep2 bf16 replicated", "[0,1]"),
    "last-fp16": ("pp2-ep2 fp16 replicated-overlap", "[1,0]"),
    "last-fp32": ("pp2-ep2 fp32 replicated", "[1,0]"),
    "first-distributed": ("pp2-ep2 bf16 distributed", "[0,1]"),
}
"""Which stage has no expert: what it trains with, and the layers that have experts."""


@pytest.mark.parametrize("name", slow_but({"last-fp32"}, BARE_STAGES))
def test_a_job_with_a_stage_without_experts_resumes(program, tmp_path, name):
    levels, layers = BARE_STAGES[name]
    job = program(Combination.of(levels), f"--moe-layer-freq={layers}")
    run, uninterrupted = Run(job, tmp_path / "stopped"), Run(job, tmp_path / "uninterrupted")
    assert run.finish("--exit-interval=4")["iteration"] == 4
    assert digest_differences(run.finish(), uninterrupted.finish()) == []


def test_tensor_peers_that_hold_the_same_experts_train_them_alike(program, tmp_path):
    combination = Combination.of("tp2 bf16 replicated-overlap")
    job = program(combination, "--expert-tensor-parallel-size=1")
    run, uninterrupted = Run(job, tmp_path / "stopped"), Run(job, tmp_path / "uninterrupted")
    stopped_at = run.finish("--exit-interval=4")["iteration"]
    digest = run.finish()
    one, other = digest["ranks"].values()
    experts = [name for name in one if ".experts." in name]
    assert (stopped_at, digest["iteration"], len(experts)) == (4, TRAIN_ITERS, 8)
    assert [name for name in experts if one[name] != other[name]] == []
    assert digest_differences(digest, uninterrupted.finish()) == []


def operators(digest):
    """Returns the checksum of every operator of every rank."""
    return {
        (rank, name): checksum
        for rank, own in digest["ranks"].items()
        for name, checksum in own.items()
    }


def in_common(one, other):
    """Returns the keys under which both have the same value; both have the same keys."""
    assert one.keys() == other.keys()
    return [key for key in one if one[key] == other[key]]


def test_a_run_with_another_seed_has_no_bit_in_common(program, uninterrupted, tmp_path):
    digest = Run(program(CONTROL), tmp_path).finish("--seed=1235")
    expected = uninterrupted(CONTROL).digest
    assert in_common(digest["loss"], expected["loss"]) == []
    assert in_common(operators(digest), operators(expected)) == []


def test_one_step_less_changes_every_operator(program, uninterrupted, tmp_path):
    shorter = TRAIN_ITERS - 1
    run = Run(program(CONTROL), tmp_path)
    digest = run.finish(f"--exit-interval={shorter}")
    expected = uninterrupted(CONTROL).digest
    assert (digest["iteration"], expected["iteration"]) == (shorter, TRAIN_ITERS)
    assert digest["loss"].items() < expected["loss"].items()
    assert in_common(operators(digest), operators(expected)) == []


def test_without_the_random_streams_dropout_changes_what_follows(program, uninterrupted, tmp_path):
    run = Run(program(CONTROL), tmp_path)
    stopped_at = run.finish("--exit-interval=4")["iteration"]
    digest = run.finish("--no-load-rng")
    expected = uninterrupted(CONTROL).digest
    before = [str(step) for step in range(1, stopped_at + 1)]
    assert in_common(digest["loss"], expected["loss"]) == before
    # An expert that no token reached in these steps is what it would have been.
    same = in_common(operators(digest), operators(expected))
    assert [name for _, name in same if ".experts." not in name] == []


@pytest.mark.parametrize("combination", EXAMPLE_PARAMETERS[:1])
def test_evaluation_in_between_changes_no_bit(program, uninterrupted, tmp_path, combination):
    run = Run(program(combination), tmp_path)
    digest = run.finish("--eval-iters=2", "--eval-interval=2")
    evaluations = [one for one in read_events(run.events) if one.event is EventName.EVALUATION]
    assert {one.iteration for one in evaluations} == {2, 4, TRAIN_ITERS}
    assert digest_differences(digest, uninterrupted(combination).digest) == []


def test_overlapped_communication_changes_no_bit(program, uninterrupted, tmp_path):
    levels = ["distributed" if one == "distributed-overlap" else one for one in OVERLAPPED.levels]
    run = Run(program(Combination(tuple(levels))), tmp_path)
    assert digest_differences(run.finish(), uninterrupted(OVERLAPPED).digest) == []


def samples_by_step(flags):
    """Returns the tokens of the samples of each step."""
    from megatron_moevement.training.data.batches import MicroBatches  # noqa: PLC0415
    from megatron_moevement.training.steps import build_datasets  # noqa: PLC0415
    from tests.harness.tiny_job import tiny_job  # noqa: PLC0415

    with tiny_job(*flags, base=()) as job:
        dataset, vocab_size = build_datasets(job).train, job.arguments.data.vocab_size
        batches = MicroBatches(dataset, job.batches, 0, vocab_size)
        size = job.batches.global_batch_size
        return [
            [row for batch in batches.step(step * size) for row in batch["tokens"].tolist()]
            for step in range(TRAIN_ITERS)
        ]


def test_no_two_samples_of_a_run_are_the_same(megatron_fork_server, text):
    one_rank = Combination.of("edp3")
    flags = [*one_rank.flags, *data_flags(text), f"--train-iters={TRAIN_ITERS}"]
    result = megatron_fork_server.run(samples_by_step, world_size=1, args=[flags])
    (steps,) = result.check().values
    samples = [tuple(sample) for step in steps for sample in step]
    assert len(steps) == TRAIN_ITERS
    assert len(set(samples)) == len(samples) == 12 * TRAIN_ITERS


SAVES = Combination.of("vpp2 fp16 distributed")
LONG = 8
"""Steps of a run that dies again and again."""
LIVES = 4
LONGEST_SAVE_S = 0.1


def saves_in_progress(run):
    """Returns what identifies the save that is going on, or was when the job died."""
    found = set()
    for path in (run.checkpoints / "moevement").glob("*.writing"):
        with contextlib.suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_ctime_ns))
    return found


def kill_in_a_save(run, job, world_size, delay_s):
    """Kills all ranks in a save, about a time after it began; returns whether one was going on.

    A save may be over before the time is: the ranks are stopped to see that, and the next save is
    met earlier.
    """
    left, ranks = saves_in_progress(run), range(world_size)
    while psutil.pid_exists(job.pids[0]):
        time.sleep(0.001)
        if not saves_in_progress(run) - left:
            continue
        time.sleep(delay_s)
        send(job, signal.SIGSTOP, ranks)
        await_stops(job)
        if saves_in_progress(run) - left:
            break
        send(job, signal.SIGCONT, ranks)
        delay_s /= 2
    kill_all(job, world_size)
    return bool(saves_in_progress(run) - left)


def await_stops(job):
    """Waits until each process of a job is stopped or has ended."""
    for pid in job.pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            while process.status() not in {psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE}:
                time.sleep(0.001)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))]
)
def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(program, tmp_path, seed):
    saving = program(SAVES, "--save-interval=1", train_iters=LONG)
    random = Random(seed)
    run = Run(saving, tmp_path / "killed")
    folder = CheckpointFolder(run.checkpoints)
    unfinished = 0
    for _ in range(LIVES):
        with run.start() as job:
            delay_s = random.uniform(0, LONGEST_SAVE_S)
            unfinished += kill_in_a_save(run, job, saving.world_size, delay_s)
        assert [folder.damage(iteration) for iteration in folder.iterations()[:1]] in ([], [None])
    assert unfinished > 0
    expected = Run(saving, tmp_path / "uninterrupted").finish()
    assert digest_differences(run.finish(), expected) == []
