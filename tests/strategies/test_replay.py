# SPDX-License-Identifier: Apache-2.0
"""Whether a replayed step takes its statistics from the ledger is the same on all ranks."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from megatron_moevement.integrations.megatron.optimizer import GradientStatistics
from megatron_moevement.policy.facts.facts import Condition, LiveState
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.strategies.moevement.carried_state import SurvivingState
from megatron_moevement.strategies.moevement.recovery.replay import Replay

WINDOW = Window(start=8, size=4)
TARGET = 13
SLOTS_OF_STAGES = ((2, 1, 1, 0), (0, 0, 0, 2), (1, 1, 1, 1))
"""Operators that become FULL in each slot; the first stage has none for the last one."""


def replay_of(sizes, kept=None, *, is_apart=True):
    """Returns the replay of a rank whose slots bring in so many operators.

    Args:
        is_apart: whether other stages stand by.
    """
    operators = [[f"{slot}.{n}" for n in range(size)] for slot, size in enumerate(sizes)]
    start = WINDOW.start if kept is None else kept.step
    scalars = SimpleNamespace(progress=SimpleNamespace(committed=start), adam_step=8, state=None)
    slots = SimpleNamespace(
        window=WINDOW,
        scalars=lambda slot: scalars,
        put_back=lambda slot, live: frozenset(operators[slot]),
        full_before=lambda slot: frozenset(one for each in operators[:slot] for one in each),
    )
    live = Mock(operators=[one for slot in operators for one in slot])
    entries = {
        step: SimpleNamespace(found_inf=(False,), grad_norm=float(step))
        for step in range(WINDOW.start + 1, TARGET + 1)
    }
    begins = LiveState(Condition.PARTIAL, start, WINDOW) if kept is None else kept
    return Replay(
        *(Mock(live=live), Mock(), slots, SimpleNamespace(target=TARGET, is_apart=is_apart)),
        entries=entries,
        witness=Mock(),
        begins=SurvivingState(begins, scalars),
    )


def entered(replay):
    """Brings in the slot of each step up to the target; yields the step before each."""
    for step in range(replay.start.committed, TARGET):
        replay.progress = SimpleNamespace(committed=step)
        replay.enter()
        yield step


def injected(replay):
    """Returns the steps whose statistics come from the ledger, of all that are replayed."""
    taken = []
    for step in entered(replay):
        statistics = replay.statistics(step + 1)
        if statistics is not None:
            assert statistics == GradientStatistics(found_inf=(False,), norm=float(step + 1))
            taken.append(step + 1)
    return taken


@pytest.mark.parametrize("sizes", SLOTS_OF_STAGES)
def test_the_ledger_speaks_until_the_operators_of_all_stages_are_active(sizes):
    replay = replay_of(sizes, is_apart=False)
    assert injected(replay) == [9, 10, 11]
    assert replay.is_dense


def test_the_ledger_speaks_where_a_state_was_kept_and_others_convert_the_window():
    kept = LiveState(Condition.DENSE, 9)
    assert injected(replay_of((1, 1, 1, 1), kept, is_apart=False)) == [10, 11]


def test_the_ledger_speaks_all_the_time_where_other_stages_stand_by():
    assert injected(replay_of((1, 1, 1, 1))) == [9, 10, 11, 12, 13]


@pytest.mark.parametrize("sizes", SLOTS_OF_STAGES)
def test_a_state_is_partial_until_the_last_slot_whatever_the_slots_hold(sizes):
    replay = replay_of(sizes)
    found = [replay.state for _ in entered(replay)]
    partial = [LiveState(Condition.PARTIAL, step, WINDOW) for step in (8, 9, 10)]
    assert found == [*partial, LiveState(Condition.DENSE, 11), LiveState(Condition.DENSE, 12)]


@pytest.mark.parametrize("step", range(WINDOW.start, WINDOW.last + 1))
def test_a_partial_state_goes_on_with_the_operators_of_the_slots_before_it(step):
    kept = LiveState(Condition.PARTIAL, step, WINDOW)
    from_window = replay_of((1, 1, 1, 1))
    active = {}
    for reached in entered(from_window):
        active[reached] = from_window._freezing.set_active.call_args
    goes_on = replay_of((1, 1, 1, 1), kept)
    assert goes_on.state == kept
    for reached in entered(goes_on):
        if reached <= WINDOW.last:
            assert goes_on._freezing.set_active.call_args == active[reached]
    restored = goes_on._session.objects.restore
    assert restored.called == (step == WINDOW.start)  # the scalars of a kept state are its own
