# SPDX-License-Identifier: Apache-2.0
"""A bit flips in an upstream log, or on its way between processes: it is seen, and no bit is wrong.

What arrived damaged is not used. A copy is sent again, and a recovery begins again, from other
copies or logs where there are some.
"""

import dataclasses
from pathlib import Path

import pytest

from megatron_moevement.runtime.observation.events import EventName
from megatron_moevement.testing.lost_states import LostStates
from tests.harness.default_run import slow_but
from tests.harness.fault_cover import UNTIED
from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case
from tests.harness.restarted_run import events_of, restartable_program

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).with_name("flips_pretrain.py")
CASE = dataclasses.replace(Case.of("vpp2 fp32 replicated no-dropout", 2), replicas=1, deaths=1)
REPLICATED = dataclasses.replace(Case.of("edp3 bf16", 2), deaths=1, lost=LostStates.COPIED)
WHOLE = dataclasses.replace(Case.of("vpp2 bf16 distributed", 2), deaths=1)
"""Its stages share the embedding: all replay."""
STAGES = dataclasses.replace(Case.of("edp3 bf16", 2), deaths=1)
"""With the flags below: three stages of one rank."""
SHAPES = {
    CASE: (UNTIED,),
    REPLICATED: (),
    WHOLE: (),
    STAGES: (UNTIED, "--pipeline-model-parallel-size=3", "--num-layers=3"),
}
KILLED = CASE.protected_from + 2


@pytest.fixture(scope="session")
def digest_of(uninterrupted):
    """Returns what a case trains when nothing protects it and no bit flips."""
    return lambda case: uninterrupted(case, *SHAPES[case])


def struck(server, text, folder, case, *flags, lost=1):
    """Runs a job of which a rank is lost with its memory; returns the run and what was printed."""
    program = restartable_program(case, server, text, 1, *SHAPES[case], *flags)
    run = Run(dataclasses.replace(program, path=PROGRAM), folder)
    with run.start("--moevement-faults", f"{KILLED}:backward@{lost}") as job:
        result = job.wait()
    codes = sorted(result.exit_codes)
    assert codes == [-9] + [0] * (len(codes) - 1), result.describe()
    return run, "".join(rank.stderr for rank in result.ranks)


def plans_of(run):
    """Returns verdict, target and scope of each generation's plan."""
    found = {}
    for event in events_of(run, EventName.PLAN, None):
        fields = event.fields
        plan = (fields["verdict"], fields["target"], tuple(fields["scope"]))
        assert found.setdefault(event.generation, plan) == plan
    return [found[generation] for generation in sorted(found) if generation]


def check_replays(run, generation):
    """Checks that a generation replayed at least a window, and proved all of it."""
    replays = events_of(run, EventName.REPLAY, generation)
    assert len({event.iteration for event in replays}) >= CASE.window - 1
    assert all(event.fields["replay_verified"] for event in replays)


REASONS = {"wire": "what arrived is not what the peer sent", "memory": "arrived damaged"}
"""What finds it: the proof of the message, or the checksum of what it carries."""


@pytest.mark.slow
@pytest.mark.parametrize("where", REASONS)
def test_a_copy_that_arrives_damaged_is_sent_again(
    megatron_fork_server, text, digest_of, tmp_path, where
):
    run, said = struck(megatron_fork_server, text, tmp_path, CASE, f"--flip-sent=SLOT:0:{where}")
    assert REASONS[where] in said
    assert plans_of(run) == [("LOCALIZED", KILLED - 1, (1,))]
    check_replays(run, 1)
    persisted = events_of(run, EventName.WINDOW_PERSISTED, 0)
    assert {event.fields["copies"] for event in persisted} == {CASE.replicas}
    assert digest_differences(run._digest(), digest_of(CASE)) == []


DAMAGED = {"wire": REASONS["wire"], "memory": "damaged"}


@pytest.mark.slow
@pytest.mark.parametrize("where", DAMAGED)
@pytest.mark.parametrize(("kind", "error"), [("FOUND", "FetchError"), ("LOGGED", "LogReadError")])
def test_what_a_recovery_fetches_and_arrives_damaged_is_fetched_again(
    megatron_fork_server, text, digest_of, tmp_path, kind, error, where
):
    # The spare holds rank 1's slots; those of rank 0 come from rank 1, and so do its logs.
    flip = f"--flip-sent={kind}:1:{where}"
    run, said = struck(megatron_fork_server, text, tmp_path, CASE, flip, lost=0)
    (line,) = [line for line in said.splitlines() if f"process 2 ends: {error}" in line]
    assert DAMAGED[where] in line
    assert plans_of(run) == [("LOCALIZED", KILLED - 1, (0,))] * 2
    check_replays(run, 2)
    assert digest_differences(run._digest(), digest_of(CASE)) == []


@pytest.mark.slow
def test_a_holder_that_sends_nothing_intact_is_passed_over(
    megatron_fork_server, text, digest_of, tmp_path
):
    flip = "--flip-sent=FOUND:1:always-wire"
    run, said = struck(megatron_fork_server, text, tmp_path, STAGES, flip, lost=0)
    assert "what arrived is not what the peer sent; another process has it, too" in said
    assert plans_of(run) == [("LOCALIZED", KILLED - 1, (0,))]
    check_replays(run, 1)
    assert digest_differences(run._digest(), digest_of(STAGES)) == []


@pytest.mark.slow
@pytest.mark.parametrize("where", DAMAGED)
def test_a_state_that_arrives_damaged_is_copied_again(
    megatron_fork_server, text, digest_of, tmp_path, where
):
    flip = f"--flip-sent=STATE_PART:0:{where}"
    run, said = struck(megatron_fork_server, text, tmp_path, REPLICATED, flip)
    (line,) = [line for line in said.splitlines() if "process 3 ends: StateReadError" in line]
    assert DAMAGED[where] in line
    assert plans_of(run) == [("COPIED", KILLED - 1, ())] * 2
    assert digest_differences(run._digest(), digest_of(REPLICATED)) == []


@pytest.mark.slow
def test_a_copy_that_is_damaged_in_memory_is_passed_over(
    megatron_fork_server, text, digest_of, tmp_path
):
    flip = "--flip-kept=1:held"
    run, said = struck(megatron_fork_server, text, tmp_path, STAGES, flip, lost=0)
    assert "process 1 has it damaged" in said
    assert plans_of(run) == [("LOCALIZED", KILLED - 1, (0,))]
    check_replays(run, 1)
    assert digest_differences(run._digest(), digest_of(STAGES)) == []


@pytest.mark.parametrize("role", slow_but(("held",), ("own", "held")))
def test_a_slot_that_is_found_damaged_when_it_is_needed_leads_to_another_plan(
    megatron_fork_server, text, digest_of, tmp_path, role
):
    """An own slot is loaded by all that replay; of a held one there is no other copy."""
    case, lost = (WHOLE, 1) if role == "own" else (CASE, 0)
    flip = f"--flip-kept={1 - lost}:{role}"
    run, said = struck(megatron_fork_server, text, tmp_path, case, flip, lost=lost)
    assert ("is damaged in" if role == "own" else "has it damaged") in said
    first, second = plans_of(run)  # the window before the persisted one leaves room in the log
    assert first[:2] == ("GLOBAL" if role == "own" else "LOCALIZED", KILLED - 1)
    assert second == ("GLOBAL", KILLED - 1, (0, 1))
    assert digest_differences(run._digest(), digest_of(case)) == []


@pytest.mark.parametrize("when", slow_but(("fetch",), ("facts", "fetch")))
def test_a_stage_with_a_damaged_log_joins_the_replay(
    megatron_fork_server, text, digest_of, tmp_path, when
):
    run, said = struck(megatron_fork_server, text, tmp_path, CASE, f"--flip-logged=0:{when}")
    assert plans_of(run) == [("LOCALIZED", KILLED - 1, (1,)), ("GLOBAL", KILLED - 1, (0, 1))]
    assert "does not read as it was logged" in said
    check_replays(run, 2)
    assert digest_differences(run._digest(), digest_of(CASE)) == []
