# SPDX-License-Identifier: Apache-2.0
"""Faults at the places of a start and of a recovery, which lie in no step; no bit changes."""

import dataclasses
import signal

import pytest

from megatron_moevement.runtime.observation.events import EventName
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.testing.lost_states import LostStates
from tests.harness.fault_cover import UNTIED
from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case
from tests.harness.restarted_run import events_of, restartable_program

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASE = dataclasses.replace(Case.of("vpp2 fp32 replicated no-dropout", 2), replicas=1, deaths=1)
REPLICATED = dataclasses.replace(Case.of("edp3 bf16", 2), lost=LostStates.COPIED)
STEP = CASE.protected_from + 2
SERVING = ("serve-slot", "serve-log", "serve-state")
OUTSIDE = ("connect", "start", "facts", "plan", "open", "reprotect", "rejoin")
KILLED = -signal.SIGKILL


@pytest.fixture(scope="session")
def untied(uninterrupted):
    """Returns the digest of two stages with embeddings of their own that nobody interrupts."""
    return uninterrupted(CASE, UNTIED)


def struck(server, text, folder, case, spares, *faults):
    """Runs a job through faults; returns the run and how its processes ended."""
    flags = (UNTIED,) if case is CASE else ()
    run = Run(restartable_program(case, server, text, spares, *flags), folder)
    with run.start("--moevement-faults", *faults) as job:
        result = job.wait()
    return run, result


def check(run, result, digest, killed, active):
    """Checks ends and bits, and that every fault struck."""
    codes = sorted(result.exit_codes)
    assert codes == [KILLED] * killed + [0] * (len(codes) - killed), result.describe()
    assert len(codes) - killed >= active
    assert digest_differences(run._digest(), digest) == []
    assert list(run.store.rglob("*")) == []


def places_of(run):
    return [event.fields["place"] for event in events_of(run, EventName.FAULT_INJECTED, None)]


def verdicts_of(run, generation):
    plans = events_of(run, EventName.PLAN, generation)
    return {(plan.fields["verdict"], plan.fields["target"]) for plan in plans}


def test_every_place_of_a_start_or_a_recovery_is_struck():
    struck = {*OUTSIDE, *SERVING, "roll-forward"}
    assert struck == {place.value for place in FaultPoint if not place.is_of_step}


def test_each_recovery_is_struck_at_the_next_place(megatron_fork_server, text, untied, tmp_path):
    faults = [
        f"exception:{STEP}:{place}@{number % 2}#{number}"
        for number, place in enumerate(OUTSIDE, start=1)
    ]
    run, result = struck(
        megatron_fork_server, text, tmp_path, CASE, 1, f"{STEP}:backward@1", *faults
    )
    check(run, result, untied, killed=1, active=2)
    last = verdicts_of(run, len(OUTSIDE) + 1)
    assert {target for _, target in last} == {STEP - 1}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1], ids=["survivor", "newcomer"])
@pytest.mark.parametrize("place", [*OUTSIDE, *SERVING[:2]])
def test_a_death_at_any_place_of_a_recovery_changes_no_bit(
    megatron_fork_server, text, untied, tmp_path, place, rank
):
    lost = 1 - rank if place.startswith("serve") else 1  # who survives serves
    faults = (f"{STEP}:backward@{lost}", f"{STEP}:{place}@{rank}#1")
    run, result = struck(megatron_fork_server, text, tmp_path, CASE, 2, *faults)
    check(run, result, untied, killed=2, active=2)
    if place != "connect":  # which comes before events
        assert places_of(run) == ["backward", place]


@pytest.mark.slow
@pytest.mark.parametrize("place", [place for place in OUTSIDE if place not in {"plan"}])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_death_in_the_first_start_costs_nothing(
    megatron_fork_server, text, untied, tmp_path, place, rank
):
    if place in {"reprotect", "rejoin"}:
        pytest.skip("nothing is recovered")
    run, result = struck(megatron_fork_server, text, tmp_path, CASE, 1, f"1:{place}@{rank}")
    check(run, result, untied, killed=1, active=2)


@pytest.mark.slow
def test_who_copies_a_state_turns_to_another_replica(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    step = REPLICATED.protected_from + 2
    faults = (f"{step}:backward@1", *(f"{step}:serve-state@{rank}#1" for rank in (0, 2)))
    program = restartable_program(REPLICATED, megatron_fork_server, text, 2)
    run = Run(program, tmp_path)
    with run.start("--moevement-faults", *faults) as job:
        result = job.wait()
    # One of the two serves and is struck; that the other one never was is an error by itself.
    assert sorted(result.exit_codes)[:2] == [KILLED] * 2, result.describe()
    assert places_of(run) == ["backward", "serve-state"]
    assert {verdict for verdict, _ in verdicts_of(run, 2)} == {"COPIED"}
    assert digest_differences(run._digest(), uninterrupted(REPLICATED)) == []


@pytest.mark.parametrize(
    ("place", "target"),
    [
        ("ledger", STEP - 1),
        *(
            pytest.param(place, target, marks=pytest.mark.slow)
            for place, target in (
                ("optimizers", STEP - 1),
                ("roll-forward", STEP - 1),
                ("committed", STEP),
            )
        ),
    ],
)
def test_no_state_is_ahead_of_what_its_journal_has(
    megatron_fork_server, text, untied, tmp_path, place, target
):
    """The only other process that knows the step dies after this one was cut in rolling forward."""
    faults = (
        f"exception:{STEP}:after-barrier@1",
        f"exception:{STEP}:{place}@1#1",
        f"{STEP}:start@0#2",
    )
    run, result = struck(megatron_fork_server, text, tmp_path, CASE, 1, *faults)
    check(run, result, untied, killed=1, active=2)
    assert places_of(run) == ["after-barrier", place, "start"]
    assert not events_of(run, EventName.PLAN, 2)
    assert verdicts_of(run, 3) == {("GLOBAL", target)}
    assert not events_of(run, EventName.PLAN, 4)
