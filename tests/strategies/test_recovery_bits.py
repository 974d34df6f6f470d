"""A job all of whose processes are killed goes on from their memory, with the same bits.

One test body over combinations of layout, precision, optimizer, experts, window and the rest. A few
run by default; a set in which every two settings meet is marked slow and runs by one command:

    ./scripts/recovery_campaign.sh
"""

import dataclasses
import functools
import shutil
from pathlib import Path
from random import Random

import pytest

from megatron_moevement.runtime.events import EventName, read_events
from megatron_moevement.testing.combinations import Combination, cover
from megatron_moevement.testing.interruption import Program, Run, digest_differences
from megatron_moevement.testing.random_text import data_flags, prepare_random_text

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

PROGRAM = Path(__file__).parents[2] / "pretrain_moe.py"
WINDOWS = (1, 2, 3, 5)
OURS = ("--num-workers=1", "--moevement-no-progress-bar")


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained, and in how many sparse snapshots it is protected."""

    combination: Combination
    window: int

    @property
    def protected_from(self):
        """A step whose commit means that a window is persisted: the ring has no more room."""
        return 2 * self.window + 1

    @property
    def train_iters(self):
        return self.protected_from + 8

    @property
    def name(self):
        return f"w{self.window}-{self.combination.name}"


EXAMPLES = (
    Case(Combination.of("edp3 fp16 distributed bias"), 3),
    Case(Combination.of("vpp2 fp16 replicated grouped"), 2),
    Case(Combination.of("pp2-ep2 bf16 distributed grouped"), 5),
    Case(Combination.of("tp2 fp32 seq-aux recomputed evaluation"), 3),
    Case(Combination.of("pp2-dp2-ep2 bf16 distributed-overlap grouped global-aux linear"), 2),
    Case(Combination.of("edp3 bf16 replicated-overlap allgather"), 1),
)
COVER = tuple(
    Case(combination, WINDOWS[number % len(WINDOWS)]) for number, combination in enumerate(cover())
)
CASES = [
    *(pytest.param(case, id=case.name) for case in EXAMPLES),
    *(
        pytest.param(case, id=f"cover{number:02}-{case.name}", marks=pytest.mark.slow)
        for number, case in enumerate(COVER)
    ),
]
SMALL = EXAMPLES[1]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Returns the prefix of random text: no two samples of it are the same."""
    return prepare_random_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def program(megatron_fork_server, text):
    """Returns the program with the flags of a case."""

    def of(case, *flags):
        flags = (*case.combination.flags, *OURS, *data_flags(text), *flags)
        world_size = case.combination.world_size
        return Program(megatron_fork_server, PROGRAM, world_size, case.train_iters, flags)

    return of


@pytest.fixture(scope="module")
def protected(program):
    """Returns the program with the flags of a case, protected by sparse snapshots."""
    return lambda case, *flags: program(
        case, "--moevement-strategy=moevement", f"--moevement-window={case.window}", *flags
    )


@pytest.fixture(scope="module")
def uninterrupted(program, tmp_path_factory):
    """Returns the digest of a case that nothing protects and nobody interrupts."""

    @functools.cache
    def digest(case):
        folder = tmp_path_factory.mktemp("uninterrupted")
        result = Run(program(case), folder).finish()
        shutil.rmtree(folder)
        return result

    return digest


def events_of(run, name, rank=0):
    return [
        each for each in read_events(run.events) if (each.event, each.logical_rank) == (name, rank)
    ]


def assert_recovered_from_memory(run, case, launches):
    """Every launch after the first was a replay of at least W - 1 steps that proved itself."""
    plans = events_of(run, EventName.PLAN)
    assert [plan.fields["verdict"] for plan in plans] == ["GLOBAL"] * launches
    for rank in range(case.combination.world_size):
        replays = iter(events_of(run, EventName.REPLAY, rank))
        for plan in plans:
            start, target = plan.fields["window"], plan.fields["target"]
            assert target - start >= case.window - 1
            for step in range(start + 1, target + 1):
                replay = next(replays)
                assert replay.iteration == step
                assert replay.fields["replay_verified"]
                assert step >= start + case.window or replay.fields["frozen"] > 0
        assert next(replays, None) is None


@pytest.mark.parametrize("case", CASES)
def test_a_job_whose_processes_are_all_killed_ends_with_the_bits_of_one_that_is_not(
    protected, uninterrupted, tmp_path, case
):
    random = Random(case.name)
    run = Run(protected(case), tmp_path)
    step = case.protected_from + random.randint(0, 1)
    run.kill(step, random)
    run.kill(step + 2 + random.randint(0, 1), random)
    assert digest_differences(run.finish(), uninterrupted(case)) == []
    assert_recovered_from_memory(run, case, launches=2)
    assert list(run.store.rglob("*")) == []
