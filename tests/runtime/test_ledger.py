# SPDX-License-Identifier: Apache-2.0
"""The ledger keeps what a replay needs, and every loss."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.runtime.coordination.ledger import (
    Ledger,
    LedgerEntry,
    loss_from_hex,
    loss_to_hex,
)


def entry(step, loss=None):
    return LedgerEntry(
        step=step,
        loss=float(step) if loss is None else loss,
        consumed_samples=(step - 1) * 8,
        loss_scale=1.0,
        found_inf=(False,),
        grad_norm=1.0,
        clip_factor=1.0,
        num_tokens=64,
        groups=(),
        scalers=(None,),
        random_state=None,
    )


def filled(retained_steps, steps):
    ledger = Ledger(retained_steps)
    for step in range(1, steps + 1):
        ledger.append(entry(step))
    return ledger


def test_the_newest_entries_are_retained_and_all_losses():
    ledger = filled(retained_steps=3, steps=5)
    assert [ledger[step].step for step in (3, 4, 5)] == [3, 4, 5]
    for step in (2, 6):
        with pytest.raises(KeyError):
            ledger[step]
    assert ledger.losses() == {step: float(step) for step in range(1, 6)}


def test_a_step_that_is_added_again_replaces_its_entry_and_nothing_else():
    ledger = filled(retained_steps=3, steps=5)
    ledger.append(entry(4, loss=40.0))
    assert ledger[4].loss == 40.0
    assert ledger.losses() == {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0, 5: 5.0}
    assert (ledger[3].step, ledger[5].step) == (3, 5)


def test_the_losses_handed_out_are_a_copy():
    ledger = filled(retained_steps=3, steps=1)
    ledger.losses()[1] = 7.0
    assert ledger.losses() == {1: 1.0}


def test_a_restored_history_replaces_what_was_there():
    ledger, history = filled(retained_steps=3, steps=5), {1: 0.5, 2: 0.25}
    ledger.restore_losses(history)
    history[3] = 1.0
    assert ledger.losses() == {1: 0.5, 2: 0.25}
    with pytest.raises(KeyError):
        ledger[5]


def test_an_entry_can_not_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry(1).loss = 2.0


@given(st.floats(width=32, allow_nan=False))
def test_a_loss_comes_back_from_its_bits_as_it_was(loss):
    text = loss_to_hex(loss)
    assert len(text) == 8
    again = loss_from_hex(text)
    assert (again, math.copysign(1, again)) == (loss, math.copysign(1, loss))


def test_neighbouring_losses_have_different_bits():
    assert (loss_to_hex(1.0), loss_to_hex(1.0 + 2**-23)) == ("3f800000", "3f800001")
