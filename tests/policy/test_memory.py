"""Memory: every byte has an account, and the bound holds for every schedule in force."""

import dataclasses
import re

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.policy.memory import (
    MemoryAccount,
    StepBytes,
    account_memory,
    check_budget,
    ring_bytes,
)
from megatron_moevement.policy.operators import Inventory, Operator, OperatorId, OperatorKind
from megatron_moevement.policy.placement import Host, place_replicas
from megatron_moevement.policy.ranks import LogicalRank
from megatron_moevement.policy.schedule import WindowSchedule

EXPERTS = [OperatorId(OperatorKind.EXPERT, 0, number) for number in range(2)]
RANKS = [LogicalRank(dp=number) for number in range(2)]
INVENTORY = Inventory(
    {
        RANKS[0]: (Operator(EXPERTS[0], 12, 2), Operator(EXPERTS[1], 24, 4)),
        RANKS[1]: (Operator(EXPERTS[0], 6, 1), Operator(EXPERTS[1], 0, 0)),
    }
)
SCHEDULE = WindowSchedule(INVENTORY, 2, {EXPERTS[0]: 0, EXPERTS[1]: 1})
HOSTS = [Host(0, "a", RANKS[0]), Host(1, "b", RANKS[1]), Host(2, "c")]


def test_a_ring_has_room_for_the_worst_slot_everywhere():
    assert SCHEDULE.bytes_by_slot[RANKS[0]] == (16, 24)
    assert ring_bytes(SCHEDULE, RANKS[0], lag=1) == 5 * 24
    assert ring_bytes(SCHEDULE, RANKS[1], lag=1) == 5 * 6


def test_every_process_pays_for_its_own_and_for_what_it_holds():
    placement = place_replicas(HOSTS, 2)
    steps = {RANKS[0]: StepBytes(log_bytes=100, ledger_bytes=7)}
    accounts = account_memory(SCHEDULE, placement, HOSTS, steps, lag=1)
    kept_steps = 4  # 2 W - 2 + L and the one under way
    assert accounts == {
        0: MemoryAccount(120, 30, kept_steps * 100, kept_steps * 7),
        1: MemoryAccount(30, 120, 0, kept_steps * 7),
        2: MemoryAccount(0, 150, 0, kept_steps * 7),
    }
    assert accounts[0].total_bytes == 120 + 30 + 400 + 28


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
