# SPDX-License-Identifier: Apache-2.0
"""A stage that lost a process replays alone, whatever happened, wherever, whenever; no bit differs.

One test body over kinds of faults, phases of a step, stages, peers, layouts and trainings. A few
rows run by default; a set in which every two settings meet is marked slow and runs by one command:

    ./scripts/fault_campaign.sh
"""

import functools
import itertools
import shutil
from random import Random

import pytest

from megatron_moevement.settings.faults import FaultPoint
from tests.harness.default_run import slow_but
from tests.harness.fault_cover import (
    COVER,
    FACTORS,
    IMPOSSIBLE,
    LARGE_ROWS,
    PHASES,
    ROWS,
    TENSOR_ROWS,
    TRAIN_ITERS,
)
from tests.harness.fault_cover_run import StruckRun, plain_program, struck_program
from tests.harness.interruption import Run
from tests.harness.pairwise import pairs_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

BY_NAME = {row.name: row for row in ROWS}
QUICK = ("segfault-boundary-send-pp2-ep2-last-last-outside-first-neighbour-fp32-replicated-w2",)
IN_RECOVERIES = {FaultPoint.FETCH, FaultPoint.REPLAY, FaultPoint.DENSE}
IN_STEPS = {place for place in FaultPoint if place.is_of_step} - IN_RECOVERIES


@pytest.fixture(scope="session")
def digest_of(megatron_fork_server, text, tmp_path_factory):
    """Returns the digest of what a layout trains when nothing protects or strikes it."""

    @functools.cache
    def digest(layout, training):
        folder = tmp_path_factory.mktemp("uninterrupted")
        row = next(row for row in ROWS if (row.layout, row.training) == (layout, training))
        found = Run(plain_program(row, megatron_fork_server, text), folder).finish()
        shutil.rmtree(folder)
        return found

    return digest


@pytest.mark.parametrize("name", slow_but(QUICK, BY_NAME))
def test_a_lost_stage_replays_alone_and_no_bit_differs(
    megatron_fork_server, text, digest_of, tmp_path, name
):
    row = BY_NAME[name]
    program = struck_program(row, megatron_fork_server, text)
    run = StruckRun(row, program, tmp_path, Random(name))
    run.go()
    run.check(digest_of(row.layout, row.training))


def test_every_two_settings_meet_but_for_the_cells_that_are_named():
    seen = {
        pair
        for row in COVER
        for pair in itertools.combinations([(name, getattr(row, name)) for name in FACTORS], 2)
    }
    assert set(pairs_of(FACTORS)) - seen == set(IMPOSSIBLE)
    assert len(BY_NAME) == len(ROWS)


def test_every_place_of_a_step_is_struck():
    assert {row.place for row in ROWS} == IN_STEPS
    assert set().union(*PHASES.values()) == IN_STEPS


def test_the_few_rows_of_the_largest_layout_have_every_kind_and_stage():
    for name in ("kind", "stage", "peer"):
        assert {getattr(row, name) for row in LARGE_ROWS} == set(FACTORS[name])


def test_the_few_rows_with_tensor_peers_have_every_level_but_a_middle_stage():
    for name in ("kind", "stage", "peer", "order", "other", "training", "window"):
        levels = {getattr(row, name) for row in TENSOR_ROWS}
        assert levels == set(FACTORS[name]) - {"middle"}


def test_at_least_half_of_the_kills_come_from_outside():
    scripted = sum(row.is_deadly for row in ROWS)
    outside = len(ROWS)
    assert outside >= scripted


def test_every_fault_strikes_behind_a_persisted_window_and_before_the_end():
    for row in ROWS:
        assert row.protected_from < row.step <= TRAIN_ITERS - 6
        assert row.phase != "window-edge" or row.step % int(row.window) == 0
        assert row.rank // row.arranged.ranks_per_stage == row.lost_stage
