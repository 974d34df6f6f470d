# SPDX-License-Identifier: Apache-2.0
"""Processes that die at a named instruction go on from their memory, with the same bits.

A run is launched again and again, and dies at another place each time until it may finish. Every
place is struck in ordinary training; those of a recovery are struck while it recovers.
"""

import dataclasses
import shutil

import pytest

from megatron_moevement.runtime.stores.store import process_folders
from megatron_moevement.settings.faults import FaultPoint
from tests.harness.default_run import slow_but
from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case, check_replays, die, plans_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASE = dataclasses.replace(Case.of("vpp2 fp16 replicated grouped", 2), deaths=1)
FIRST = CASE.protected_from + 1
RECOVERY = (FaultPoint.FETCH, FaultPoint.REPLAY, FaultPoint.DENSE)
CHAINS = {
    "passes": (
        FaultPoint.FORWARD,
        FaultPoint.FORWARD_BACKWARD,
        FaultPoint.BOUNDARY_SEND,
        FaultPoint.BACKWARD,
    ),
    "gradients": (FaultPoint.FINALIZE, FaultPoint.AFTER_FINALIZE, FaultPoint.PREPARE),
    "commit": (
        FaultPoint.BARRIER,
        FaultPoint.AFTER_BARRIER,
        FaultPoint.COMMIT,
        FaultPoint.AFTER_OPTIMIZERS,
        FaultPoint.OPTIMIZERS,
    ),
    "ledger": (FaultPoint.LEDGER, FaultPoint.COMMITTED, FaultPoint.GATHER, FaultPoint.SAVE),
    "slot": (
        FaultPoint.WINDOW_EDGE,
        FaultPoint.CAPTURE,
        FaultPoint.COPY,
        FaultPoint.PUBLISH,
        FaultPoint.AFTER_PUBLISH,
        FaultPoint.SEND,
    ),
}
"""Where a run dies, one launch after the other."""


def steps_of(place, step):
    """Returns the steps, from one on, in the first of which a place must be passed."""
    match place:
        case (
            FaultPoint.OPTIMIZERS
        ):  # a step that overflows has nothing to optimize; the next one does
            return range(step, step + 3)
        case FaultPoint.WINDOW_EDGE:
            return range(step, step + CASE.window)
        case FaultPoint.SAVE:
            return [CASE.train_iters]
    return [step]


@pytest.fixture
def run(megatron_fork_server, text, tmp_path):
    return Run(CASE.protected_program(megatron_fork_server, text), tmp_path)


def forget(run, process):
    """Takes a process's memory away."""
    (folder,) = run.store.iterdir()
    shutil.rmtree(process_folders(folder)[process])


def test_every_place_of_a_step_is_struck():
    struck = sorted([*RECOVERY, *sum(CHAINS.values(), ())], key=list(FaultPoint).index)
    assert struck == [place for place in FaultPoint if place.is_of_step]


@pytest.mark.parametrize("chain", slow_but((), CHAINS))
def test_death_at_any_instruction_of_a_step_changes_no_bit(run, uninterrupted, chain):
    for step, place in enumerate(CHAINS[chain], start=FIRST):
        die(run, CASE, place, steps_of(place, step))
    assert digest_differences(run.finish(), uninterrupted(CASE)) == []
    check_replays(run, CASE, launches=len(CHAINS[chain]))


@pytest.mark.slow
def test_the_death_of_one_process_changes_no_bit(run, uninterrupted):
    chain = ((FaultPoint.COMMIT, 0), (FaultPoint.GATHER, 1), (FaultPoint.SEND, 0))
    for step, (place, rank) in enumerate(chain, start=FIRST):
        die(run, CASE, place, [step], [rank])
    assert digest_differences(run.finish(), uninterrupted(CASE)) == []
    check_replays(run, CASE, launches=len(chain))


def test_death_in_a_recovery_changes_no_bit_and_loses_no_step(run, uninterrupted):
    chain = (*RECOVERY, FaultPoint.COMMIT, FaultPoint.LEDGER, FaultPoint.GATHER)
    die(run, CASE, FaultPoint.COMMITTED, [FIRST])
    forget(run, 1)
    replayed = range(FIRST + 1)
    for place in chain:
        die(run, CASE, place, replayed)
    assert digest_differences(run.finish(), uninterrupted(CASE)) == []
    check_replays(run, CASE, launches=len(chain) + 1, cut=len(chain))
    assert {plan["target"] for plan in plans_of(run)} == {FIRST}
