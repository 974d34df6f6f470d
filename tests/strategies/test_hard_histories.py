# SPDX-License-Identifier: Apache-2.0
"""Histories of losses that meet each other: in a fetch, in a replay, in the first window, twice.

Each job is a whole one: faults at instructions, kills from outside, spares that take the places.
"""

import dataclasses
import signal
import time
from pathlib import Path

import pytest

from megatron_moevement.policy.facts.facts_document import FACTS, load_facts
from megatron_moevement.policy.recovery.recovery_planner import plan_recovery
from megatron_moevement.runtime.observation.events import EventName, kept_documents
from tests.harness.default_run import slow_but
from tests.harness.fork_server import JobFailedError
from tests.harness.interruption import Program, Run, digest_differences
from tests.harness.protected_run import ALWAYS_TRAINED, PROGRAM
from tests.harness.restarted_run import RESTARTABLE, events_of, generation_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

BASE = (
    *("--model-preset=tiny", "--mock-data", "--tokenizer-type=NullTokenizer", "--vocab-size=319"),
    *("--seq-length=32", "--micro-batch-size=1", "--global-batch-size=4", "--lr=1e-3"),
    *("--eval-iters=0", *ALWAYS_TRAINED),
)
UNTIED = "--untie-embeddings-and-output-weights"
POLL_S = 0.02


@dataclasses.dataclass(frozen=True)
class History:
    """What is trained, and how it is struck.

    Attributes:
        ranks: that train.
        spares: that wait.
        train_iters: the last step.
        flags: of the job.
        window: W.
        replicas: r.
        faults: at instructions.
        recoveries: for each restart its verdict, and the scopes of which it may have one; empty
            where both depend on what was persisted by then.
        outside: for each kill from outside the event, generation and rank that it waits for, and
            the rank that it strikes.
        hangs: whether a process is stopped, so that limits have to be short.
        serves: whether who is killed from outside is to send slots in that recovery.
    """

    ranks: int
    spares: int
    train_iters: int
    flags: tuple[str, ...]
    window: int
    replicas: int
    faults: tuple[str, ...]
    recoveries: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]
    outside: tuple[tuple[EventName, int, int, int], ...] = ()
    hangs: bool = False
    serves: bool = False


HISTORIES = {
    # The newcomer is held in its fetch until the process is killed that its slots came from.
    "a holder is lost while a newcomer fetches": History(
        *(3, 3, 24),
        flags=(
            *("--pipeline-model-parallel-size=3", "--num-layers=3", "--hidden-size=512", UNTIED),
        ),
        window=4,
        replicas=2,
        faults=("kill:14:backward@0", "stop:9:fetch@0#1"),
        recoveries=(("LOCALIZED", ((0,),)), ("LOCALIZED", ((0, 1),))),
        outside=((EventName.FAULT_INJECTED, 1, 0, 1),),
        hangs=True,
        serves=True,
    ),
    "tied ends are lost one after the other while they replay": History(
        *(3, 4, 24),
        flags=("--pipeline-model-parallel-size=3", "--num-layers=3"),
        window=4,
        replicas=2,
        faults=("kill:13:backward@0", "kill:10:replay@2#1", "kill:11:dense@0#2"),
        recoveries=(
            ("LOCALIZED", ((0, 2),)),
            ("LOCALIZED", ((0, 2),)),
            ("LOCALIZED", ((0, 2),)),
        ),
    ),
    "the stage between tied ends is lost while they replay": History(
        *(3, 3, 24),
        flags=("--pipeline-model-parallel-size=3", "--num-layers=3"),
        window=4,
        replicas=2,
        faults=("kill:13:backward@0",),
        recoveries=(("LOCALIZED", ((0, 2),)), ("GLOBAL", ((0, 1, 2),))),
        outside=((EventName.REPLAY, 1, 0, 1),),
    ),
    "twice in the first window, while steps overflow": History(
        *(2, 2, 14),
        flags=(
            *("--pipeline-model-parallel-size=2", UNTIED, "--fp16"),
            *("--initial-loss-scale=524288", "--loss-scale-window=2", "--hysteresis=1"),
        ),
        window=4,
        replicas=2,
        faults=("kill:3:commit@1", "kill:6:send@0#1"),
        recoveries=(),
    ),
    "a peer is lost in an interleaved replay": History(
        *(8, 2, 24),
        flags=(
            *("--pipeline-model-parallel-size=2", UNTIED, "--num-layers=4"),
            "--num-virtual-stages-per-pipeline-rank=2",
            *("--expert-model-parallel-size=2", "--use-distributed-optimizer"),
            *("--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size=5000"),
            *("--global-batch-size=16", "--bf16", "--recompute-granularity=full"),
            *("--recompute-method=uniform", "--recompute-num-layers=1"),
        ),
        window=4,
        replicas=2,
        faults=("kill:14:backward@7", "kill:10:replay@5#1"),
        recoveries=(("LOCALIZED", ((1,),)), ("LOCALIZED", ((1,),))),
    ),
}


def program_of(history, server, *flags):
    """Returns the training program of a history, with more flags."""
    return Program(
        *(server, PROGRAM, history.ranks, history.train_iters, (*BASE, *history.flags, *flags)),
        timeout_s=240.0,
    )


def protected(history, server):
    """Returns the same program, protected, struck and with its spares."""
    timeouts = ("--inprocess-soft-timeout=8", "--inprocess-hard-timeout=10") * history.hangs
    program = program_of(
        *(history, server, "--moevement-strategy=moevement", "--moevement-no-replica-copy"),
        *(f"--moevement-window={history.window}", f"--moevement-replicas={history.replicas}"),
        *("--moevement-faults", *history.faults, *RESTARTABLE, *timeouts),
        f"--inprocess-active-world-size={history.ranks}",
    )
    return dataclasses.replace(program, world_size=history.ranks + history.spares)


def strike(run, job, name, generation, rank, struck):
    """Kills the occupant of a rank as soon as another one has recorded an event."""
    while not any(one.logical_rank == rank for one in events_of(run, name, generation)):
        job.poll()
        if job.has_ended:
            raise JobFailedError(job.wait().describe())
        time.sleep(POLL_S)
    starts = events_of(run, EventName.PROCESS_START, None)
    occupants = [one for one in starts if one.logical_rank == struck]
    process = job.pids.index(occupants[-1].pid)
    job.kill(process, signal.SIGKILL)
    return process


def check_recoveries(run, history):
    """Checks what each recovery was, and that it was proven."""
    for generation, (verdict, scopes) in enumerate(history.recoveries, start=1):
        plans = events_of(run, EventName.PLAN, generation)
        assert {one.fields["verdict"] for one in plans} == {verdict}, plans[0].fields["reason"]
        assert tuple(plans[0].fields["scope"]) in scopes, plans[0].fields["reason"]
    last = len(history.recoveries)
    for event in events_of(run, EventName.REPLAY, None):
        assert event.fields["replay_verified"] is True
    if last:
        assert generation_of(run) == last
        ended = events_of(run, EventName.RECOVERED, last)
        assert sorted(one.logical_rank for one in ended) == list(range(history.ranks))


def check_serves(run, generation, process):
    """Checks that a process was to send slots to another one by a generation's plan."""
    documents = [
        load_facts(path.read_text(), str(path)) for path in kept_documents(run.events, FACTS)
    ]
    (facts,) = [one for one in documents if one.generation == generation]
    occupants = {one.rank: one.process for one in facts.processes}
    fetches = list(plan_recovery(facts).slot_fetches())
    assert any(one.source == process != occupants[one.rank] for one in fetches), fetches


def check_steps(run):
    """Checks that no plan loses a step, and that no rank reports one twice."""
    plans = events_of(run, EventName.PLAN, None)
    assert {plan.fields["lost_steps"] for plan in plans} == {0}
    newest = {}
    for event in sorted(events_of(run, EventName.ITERATION, None), key=lambda one: one.time):
        assert event.iteration > newest.get(event.logical_rank, 0)
        newest[event.logical_rank] = event.iteration


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("plain")


@pytest.mark.parametrize("name", slow_but((), HISTORIES))
def test_losses_that_meet_each_other_change_no_bit(
    megatron_fork_server, plain_folder, tmp_path, name
):
    history = HISTORIES[name]
    expected = Run(program_of(history, megatron_fork_server), plain_folder / name).finish()
    run = Run(protected(history, megatron_fork_server), tmp_path)
    with run.start() as job:
        killed = [(outside[1], strike(run, job, *outside)) for outside in history.outside]
        result = job.wait()
    dead = len(history.faults) + len(history.outside)
    codes = sorted(result.exit_codes)
    assert codes == [-9] * dead + [0] * (history.ranks + history.spares - dead), result.describe()
    assert digest_differences(run._digest(), expected) == []
    check_recoveries(run, history)
    check_steps(run)
    for generation, process in killed if history.serves else ():
        check_serves(run, generation, process)
    assert list(run.store.rglob("*")) == []
    said = [rank.stderr for rank in result.ranks if "Traceback" in rank.stderr]
    assert not said, said[-1]
