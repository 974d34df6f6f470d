# SPDX-License-Identifier: Apache-2.0
"""A stage that lost a process replays alone, whatever happened, wherever, whenever; no bit differs.

One test body over kinds of faults, phases of a step, stages, peers, layouts, trainings, and changes
of the window schedule; where nothing is logged all stages replay. A few rows run by default; a set
in which every two settings meet is marked slow and runs by one command:

    ./scripts/fault_campaign.sh
"""

import dataclasses
import functools
import itertools
import shutil
from pathlib import Path
from random import Random

import pytest

from megatron_moevement.policy.job.operators import Inventory, Operator, OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.skipping_schedule import schedule_of
from megatron_moevement.settings.faults import FaultPoint
from tests.harness.default_run import slow_but
from tests.harness.fault_cover import (
    COVER,
    FACTORS,
    GLOBAL_ROWS,
    IMPOSSIBLE,
    LARGE,
    LARGE_ROWS,
    LAYOUTS,
    PHASES,
    ROWS,
    TENSOR_ROWS,
    TRAIN_ITERS,
)
from tests.harness.fault_cover_run import StruckRun, plain_program, struck_program
from tests.harness.fork_server import JobFailedError
from tests.harness.interruption import Run
from tests.harness.one_schedule import one_schedule
from tests.harness.pairwise import pairs_of
from tests.harness.planned_change import BY_INDEX, Change, Moment

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

BY_NAME = {row.name: row for row in ROWS}
QUICK = ("exit-send-pp2-ep2-first-last-outside1-neighbour-fp32-replicated-w2-window-proposed",)
OPERATOR = Operator(OperatorId(OperatorKind.EXPERT, 0, 0), 12, 2)
INVENTORY = Inventory({LogicalRank(): (OPERATOR,)})
MUTATED = Path(__file__).with_name("mutated_pretrain.py")
LONGEST_NAME = 100
"""Pytest numbers what has a longer one, and a name draws whom the kill from outside strikes."""
MUTATION = "read-by-the-newest-schedule"
CHANGED = {
    row.change: row.name
    for row in COVER
    if (row.moment, row.is_outside_first) == ("edge", False) and row.kind in {"kill", "exit"}
}
"""Of each change a job whose first recovery has windows of both schedules, and loses a state."""
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
    assert all(len(name) <= LONGEST_NAME for name in BY_NAME)


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
        assert row.rank // row.arranged.ranks_per_stage == row.lost_stage


@pytest.mark.parametrize("name", BY_NAME)
def test_a_fault_strikes_at_its_moment_of_a_change_and_of_a_window(name):
    row = BY_NAME[name]
    planned, timetable = row.planned, one_schedule(int(row.window))
    if planned is not None:
        after = schedule_of(INVENTORY, planned.new_window)
        timetable = timetable.adopted(1, after, planned.agreed)
        assert timetable.newest.first_step == planned.edge
        assert planned.due % int(row.window) == 0
        assert {
            Moment.UNPROPOSED: row.step == planned.due,
            Moment.PROPOSED: planned.due < row.step < planned.agreed,
            Moment.AGREED: row.step == planned.agreed,
            Moment.EDGE: row.step == planned.edge,
            Moment.SLOTS: planned.edge < row.step <= planned.edge + planned.new_window,
        }[Moment(row.moment)]
    assert row.phase != "window-edge" or timetable.slot_of(row.step) == 0


def test_the_order_of_experts_changes_in_no_other_row():
    for row in ROWS:
        (order,) = [flag for flag in row.protection if flag.startswith("--moevement-order=")]
        assert (order == BY_INDEX) == (row.change != Change.ORDER.value)


def test_jobs_that_replay_as_a_whole_have_every_layout_and_moment_of_both_changes():
    assert {row.layout for row in GLOBAL_ROWS} == set(LAYOUTS)
    assert {row.moment for row in GLOBAL_ROWS} == {one.value for one in Moment} - {"none"}
    assert {row.change for row in GLOBAL_ROWS} == {one.value for one in Change} - {"none"}
    assert not any(row.is_global for row in (*COVER, *LARGE_ROWS, *TENSOR_ROWS))


def test_every_layout_but_the_largest_is_struck_in_changes_of_both_kinds():
    for layout in set(LAYOUTS) - {LARGE}:
        found = {row.change for row in ROWS if row.layout == layout and not row.is_global}
        assert found == set(FACTORS["change"])
    assert set(CHANGED) == {"window", "order"}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGED.values(), ids=CHANGED)
def test_a_mutated_window_that_is_read_by_another_schedule_turns_a_row_red(
    megatron_fork_server, text, tmp_path, red, name
):
    row, says = BY_NAME[name], "was captured under another schedule"
    program = struck_program(row, megatron_fork_server, text)
    flags = (f"--mutation={MUTATION}", *program.flags)
    run = StruckRun(
        row, dataclasses.replace(program, path=MUTATED, flags=flags), tmp_path, Random(name)
    )
    with pytest.raises(JobFailedError, match=says):
        run.go()
    red(f"{MUTATION} in {name}", says)
