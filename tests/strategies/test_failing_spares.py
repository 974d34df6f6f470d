# SPDX-License-Identifier: Apache-2.0
"""A spare that fails, at once or later, waits on, and nobody waits for it."""

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.runtime.coordination.generation import Generation
from megatron_moevement.runtime.coordination.notice_board import Topic
from megatron_moevement.strategies.moevement.protection.spares import (
    NoticesOfSpares,
    Spare,
    find_spares,
)
from megatron_moevement.strategies.moevement.spare_memory import SpareHolder, SpareMemory
from tests.harness.kept_spare import ONE, PROCESS, Board, store_slots, told


class Failing:
    """A memory whose every action fails."""

    def __init__(self, error):
        self.error, self.tried = error, 0

    def begin(self, *_):
        self.tried += 1
        raise self.error


@pytest.mark.parametrize("error", [ValueError("no such thing"), UserError("no room"), OSError(5)])
def test_a_spare_that_can_keep_nothing_says_so_and_waits_on(caplog, error):
    generation = Generation(1, spares=1, board=Board())
    memory = Failing(error)
    holder = SpareHolder(PROCESS, memory, generation.board)
    holder.begin(generation, "127.0.0.1")
    holder.look()
    holder.end()
    assert memory.tried == 1
    assert find_spares(generation) == ()
    spare = Spare(PROCESS, "node2", ("127.0.0.1", 1), "net", {ONE: 3})
    assert NoticesOfSpares(generation.board, [spare]).facts() == ()  # neither is waited for
    nothing = [[PROCESS, None]]  # of what was left, too
    assert generation.board.posted == {
        Topic.SPARE: nothing,
        Topic.HELD: nothing,
        Topic.FOUND: nothing,
    }
    (line,) = caplog.records
    assert f"process {PROCESS} waits on" in line.getMessage()
    assert f"{type(error).__name__}: {error}" in line.getMessage()
    assert (line.exc_info is not None) == isinstance(error, ValueError)


class LateBoard(Board):
    """Notices of which one comes when others have been read."""

    def __init__(self, topic, late):
        super().__init__()
        self.topic, self.late = topic, late

    def read(self, topic):
        found = list(super().read(topic))
        if topic is self.topic:
            self.posted.setdefault(topic, []).extend(self.late)
            self.late = []
        return found


def test_a_spare_that_fails_hides_no_slower_one(spare):
    memory, before = spare()
    memory.learn(told())
    store_slots(memory, ONE, 3, 4, 5)
    _, before = spare()
    (held,) = before.board.read(Topic.HELD)
    board = LateBoard(Topic.HELD, [held])
    generation = Generation(2, spares=2, board=board)
    failing = SpareHolder(PROCESS + 1, Failing(UserError("no such interface")), board)
    failing.begin(generation, "")
    (found,) = find_spares(before)
    (facts,) = NoticesOfSpares(generation.board, [found]).facts()
    assert facts.process == PROCESS


def test_a_spare_that_fails_late_counts_once(spare):
    _, before = spare()
    (posted,) = before.board.read(Topic.SPARE)
    board = LateBoard(Topic.SPARE, [posted])
    failed = [PROCESS + 1, Spare(PROCESS + 1, "node3", ("", 1), "net").document()]
    board.posted = {Topic.SPARE: [failed, [PROCESS + 1, None]]}
    (found,) = find_spares(Generation(2, spares=2, board=board))
    assert found.process == PROCESS


def test_an_error_after_the_beginning_is_said_once(spare, caplog, monkeypatch):
    memory, generation = spare()
    monkeypatch.setattr(SpareMemory, "look", lambda self: {}["missing"])
    holder = SpareHolder(PROCESS, memory, generation.board)
    for _ in range(2):
        holder.look()
    assert len([one for one in caplog.records if "waits on" in one.getMessage()]) == 1
