"""Whether a replayed step takes its statistics from the ledger is the same on all ranks."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from megatron_moevement.integrations.megatron.optimizer import GradientStatistics
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.strategies.moevement.recovery.replay import Injection, Replay

WINDOW = Window(start=8, size=4)
TARGET = 13
SLOTS_OF_STAGES = ((2, 1, 1, 0), (0, 0, 0, 2), (1, 1, 1, 1))
"""Operators that become FULL in each slot; the first stage has none for the last one."""


def replay_of(sizes, injection, kept=None):
    """Returns the replay of a rank whose slots bring in so many operators."""
    operators = [[f"{slot}.{n}" for n in range(size)] for slot, size in enumerate(sizes)]
    scalars = SimpleNamespace(
        progress=SimpleNamespace(committed=WINDOW.start), adam_step=8, state=None
    )
    slots = SimpleNamespace(
        window=WINDOW,
        scalars=lambda slot: scalars,
        put_back=lambda slot, live: frozenset(operators[slot]),
    )
    live = Mock(operators=[one for slot in operators for one in slot])
    entries = {
        step: SimpleNamespace(found_inf=(False,), grad_norm=float(step))
        for step in range(WINDOW.start + 1, TARGET + 1)
    }
    return Replay(
        *(Mock(), live, Mock(), slots),
        entries=entries,
        target=TARGET,
        witness=Mock(),
        injection=injection,
        start=scalars.progress if kept is None else kept,
        is_dense=kept is not None,
    )


def injected(replay):
    """Returns the steps whose statistics come from the ledger, of all that are replayed."""
    taken = []
    for step in range(replay.start.committed, TARGET):
        replay.enter(step)
        statistics = replay.statistics(step + 1)
        if statistics is not None:
            assert statistics == GradientStatistics(found_inf=(False,), norm=float(step + 1))
            taken.append(step + 1)
    return taken


@pytest.mark.parametrize("sizes", SLOTS_OF_STAGES)
def test_the_ledger_speaks_until_the_operators_of_all_stages_are_active(sizes):
    replay = replay_of(sizes, Injection.WHILE_FROZEN)
    assert injected(replay) == [9, 10, 11]
    assert replay.is_dense


def test_the_ledger_speaks_where_a_state_was_kept_and_others_convert_the_window():
    kept = SimpleNamespace(committed=9)
    assert injected(replay_of((1, 1, 1, 1), Injection.WHILE_FROZEN, kept)) == [10, 11]


def test_the_ledger_speaks_all_the_time_where_other_stages_stand_by():
    assert injected(replay_of((1, 1, 1, 1), Injection.ALWAYS)) == [9, 10, 11, 12, 13]
