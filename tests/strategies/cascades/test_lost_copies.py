"""A slot is lost at once with every process that kept a copy of it, and others live.

Their machines' memory decides: where it stays nothing is lost, and where it is gone the job goes
back to its newest checkpoint, or to its beginning, and says how many steps that costs.
"""

import dataclasses
from pathlib import Path

import pytest

from megatron_moevement.runtime.events import EventName
from megatron_moevement.testing.interruption import Run, digest_differences
from megatron_moevement.testing.losses import CELLS, Memory
from megatron_moevement.testing.losses_run import LossesRun, plain_program, protected_program
from megatron_moevement.testing.restarted_run import events_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(550)]

PROGRAM = Path(__file__).parents[1] / "domains_pretrain.py"
(THREE,) = [cell for cell in CELLS if cell.name == "two-of-three-domains"]
CELL = dataclasses.replace(THREE, replicas=1)
"""Three stages of one rank each; rank 1 keeps the only copies of rank 0, and both are lost."""
SAVED_EVERY = 6
"""Steps; a save lies before the kill, and the next one long after it."""


@pytest.fixture(scope="module")
def digest(megatron_fork_server, text, tmp_path_factory):
    """Returns what is trained when nobody is lost."""
    folder = tmp_path_factory.mktemp("plain")
    return Run(plain_program(CELL, megatron_fork_server, text), folder).finish()


def test_what_stays_in_the_memory_of_their_machines_is_enough(
    megatron_fork_server, text, tmp_path, digest
):
    cell = dataclasses.replace(CELL, memory=Memory.STAYS)
    run = LossesRun(cell, protected_program(cell, megatron_fork_server, text, PROGRAM), tmp_path)
    run.go()
    run.check(digest)


@pytest.mark.parametrize("saves", [True, False], ids=["checkpoint", "beginning"])
def test_where_it_is_gone_the_job_goes_back_and_says_so(
    megatron_fork_server, text, tmp_path, digest, saves
):
    program = protected_program(CELL, megatron_fork_server, text, PROGRAM)
    flags = ("--moevement-no-adoption", *([f"--save-interval={SAVED_EVERY}"] if saves else []))
    run = LossesRun(CELL, dataclasses.replace(program, flags=(*program.flags, *flags)), tmp_path)
    result = run.go()
    assert result.exit_codes == (-9, -9, 0, 0, 0), result.describe()
    events = Run(program, tmp_path)
    trained = max(event.iteration for event in events_of(events, EventName.ITERATION, 0))
    plans = [event.fields for event in events_of(events, EventName.PLAN, 1)]
    assert {(plan["verdict"], *plan["scope"]) for plan in plans} == {("ROLLBACK",)}
    ((target, lost),) = {(plan["target"], plan["lost_steps"]) for plan in plans}
    assert target % SAVED_EVERY == 0
    assert (target > 0) == saves
    assert 0 <= target + lost - trained <= 1  # a step may be committed and not reported yet
    said = "".join(rank.stderr for rank in result.ranks)
    assert f"back to the durable checkpoint of step {target}, {lost} step" in said
    assert not events_of(events, EventName.REPLAY, None)
    assert digest_differences(run.digest(), digest) == []
