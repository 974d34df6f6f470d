# SPDX-License-Identifier: Apache-2.0
"""Memory: a budget that is too small is refused, with what needs how much."""

import dataclasses
import re

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.policy.copies.memory_budget import (
    MemoryAccount,
    check_budget,
)


def test_a_budget_that_is_too_small_names_the_worst_process():
    accounts = {3: MemoryAccount(10, 20, 30, 40), 4: MemoryAccount(1)}
    check_budget(accounts, 100)
    with pytest.raises(UserError, match="process 3 needs 100 bytes of host memory and may take 99"):
        check_budget(accounts, 99)


def test_the_numbers_of_a_budget_that_is_too_small_add_up():
    account = MemoryAccount(1, 20, 300, 4000)
    with pytest.raises(UserError) as refused:
        check_budget({0: account}, 4320)
    _, needed, budget, *parts = (int(number) for number in re.findall(r"\d+", str(refused.value)))
    assert (needed, budget) == (4321, 4320)
    assert parts == list(dataclasses.astuple(account))
    assert sum(parts) == needed
