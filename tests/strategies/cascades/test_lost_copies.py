# SPDX-License-Identifier: Apache-2.0
"""A slot is lost at once with every process that kept a copy of it, and others live.

Their machines' memory decides: where it stays nothing is lost, and where it is gone the job begins
with its newest checkpoint, or with its initial state. It replays the steps since then where it
still has their scalars; otherwise it says how many steps it goes back.
"""

import dataclasses
import functools
from pathlib import Path

import pytest

from megatron_moevement.runtime.observation.events import EventName
from tests.harness.interruption import Run, digest_differences
from tests.harness.losses import CELLS, Losses, Memory
from tests.harness.losses_run import LossesRun, plain_program, protected_program
from tests.harness.restarted_run import events_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(550)]

PROGRAM = Path(__file__).parents[1] / "domains_pretrain.py"
(THREE,) = [cell for cell in CELLS if cell.name == "two-of-three-domains"]
CELL = dataclasses.replace(THREE, replicas=1)
"""Three stages of one rank each; rank 1 keeps the only copies of rank 0, and both are lost."""
SAVED_EVERY = 9
"""Steps; in a long run one save lies before the kill, and the next one after it."""
SAVED_LATELY = 6


@dataclasses.dataclass(frozen=True)
class Later(Losses):
    """A cell that loses its processes when the scalars of the first steps are gone, too."""

    @property
    def protected_from(self):
        return 2 * SAVED_EVERY - 1


LATER = Later(**dataclasses.asdict(CELL))


@pytest.fixture(scope="module")
def digest_of(megatron_fork_server, text, tmp_path_factory):
    """Returns what a cell trains when nobody is lost."""

    @functools.cache
    def digest(cell):
        folder = tmp_path_factory.mktemp("plain")
        return Run(plain_program(cell, megatron_fork_server, text), folder).finish()

    return digest


def killed(server, text, folder, cell, saved_every):
    """Runs a job that loses the memory of two ranks; returns the run, its plan, what it printed."""
    program = protected_program(cell, server, text, PROGRAM)
    saves = [f"--save-interval={saved_every}"] if saved_every else []
    program = dataclasses.replace(
        program, flags=(*program.flags, "--moevement-no-adoption", *saves)
    )
    run = LossesRun(cell, program, folder)
    result = run.go()
    assert result.exit_codes == (-9, -9, 0, 0, 0), result.describe()
    first, *others = [event.fields for event in events_of(Run(program, folder), EventName.PLAN, 1)]
    assert all(other == first for other in others)
    return run, first, "".join(rank.stderr for rank in result.ranks)


def test_what_stays_in_the_memory_of_their_machines_is_enough(
    megatron_fork_server, text, tmp_path, digest_of
):
    cell = dataclasses.replace(CELL, memory=Memory.STAYS)
    run = LossesRun(cell, protected_program(cell, megatron_fork_server, text, PROGRAM), tmp_path)
    run.go()
    run.check(digest_of(CELL))


@pytest.mark.parametrize(
    ("saved_every", "state"),
    [(SAVED_LATELY, f"durable checkpoint of step {SAVED_LATELY}"), (None, "initial state")],
    ids=["checkpoint", "beginning"],
)
def test_where_it_is_gone_the_job_replays_what_it_has_the_scalars_of(
    megatron_fork_server, text, tmp_path, digest_of, saved_every, state
):
    run, plan, said = killed(megatron_fork_server, text, tmp_path, CELL, saved_every)
    assert (plan["verdict"], plan["scope"], plan["lost_steps"]) == ("GLOBAL", [0, 1, 2], 0)
    assert plan["replayed_steps"] == plan["target"] - (saved_every or 0) > 0
    assert f"all replay from the {state}" in said
    assert digest_differences(run.digest(), digest_of(CELL)) == []


@pytest.mark.parametrize("saved_every", [SAVED_EVERY, None], ids=["checkpoint", "beginning"])
def test_where_those_are_gone_too_the_job_goes_back_and_says_so(
    megatron_fork_server, text, tmp_path, digest_of, saved_every
):
    run, plan, said = killed(megatron_fork_server, text, tmp_path, LATER, saved_every)
    assert (plan["verdict"], plan["scope"]) == ("ROLLBACK", [])
    assert (target := plan["target"]) == (saved_every or 0)
    assert LATER.protected_from <= target + (lost := plan["lost_steps"])
    assert f"back to the durable checkpoint of step {target}, {lost} step" in said
    assert digest_differences(run.digest(), digest_of(LATER)) == []
