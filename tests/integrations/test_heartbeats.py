# SPDX-License-Identifier: Apache-2.0
"""Who is given up for want of signs of life."""

import dataclasses
from datetime import timedelta

from nvidia_resiliency_ext.inprocess.sibling_monitor import SiblingMonitor

from megatron_moevement.integrations.nvrx.heartbeats import Heartbeats, mend_heartbeats

LOOKS = 5


@dataclasses.dataclass
class Signs:
    """What lies in the control store."""

    newest: dict[int, list] = dataclasses.field(default_factory=dict)
    seen: Heartbeats = dataclasses.field(default_factory=Heartbeats)

    def get_heartbeat(self, rank):
        return self.get_heartbeats([rank])[0]

    def get_heartbeats(self, ranks):
        return [self.seen.look(rank, self.newest.get(rank)) for rank in ranks]


def watched(processes, dead, looks, stops=()):
    """Returns whom process 0 has given up after each of its looks at the others.

    Args:
        processes: of the job; each has a monitor, which notes its sign between two looks.
        dead: give no sign, from the first on.
        looks: of process 0.
        stops: looks before which it stands still, however long.
    """
    mend_heartbeats()
    givers = [Heartbeats() for _ in range(processes)]
    signs, found = Signs(), []
    monitor = SiblingMonitor(
        signs, 0, processes, processes, timedelta(seconds=LOOKS), timedelta(seconds=1)
    )
    monitor.terminate_unresponsive_ranks = found.extend
    signs.newest[1] = givers[0].give()  # who watches begins with a sign of its own
    after = []
    for look in range(looks):
        for rank in set(range(processes)) - set(dead):
            signs.newest[rank] = givers[rank].give()
        if look not in stops:
            monitor.check_heartbeats()
        after.append(sorted(found))
    return after


def test_nobody_is_given_up_who_gives_signs():
    assert watched(4, (), 20)[-1] == []


def test_who_is_silent_is_given_up_when_the_limit_is_reached():
    after = watched(4, (1,), LOOKS + 1)
    assert after[LOOKS - 1 :] == [[], [1]]


def test_those_who_are_lost_together_are_all_found_though_only_one_watches():
    after = watched(4, (1, 2, 3), LOOKS + 3)
    assert after[-1] == [1, 2, 3]


def test_time_in_which_nobody_looks_does_not_count():
    after = watched(4, (), 40, stops=range(5, 35))
    assert after[-1] == []


def test_a_sign_that_was_seen_before_is_none():
    giver, seen = Heartbeats(), Heartbeats()
    first, second = giver.give(), giver.give()
    assert [seen.look(0, sign) for sign in (first, second, first, second)] == [0, 0, 1, 2]
    assert [seen.look(0, sign) for sign in (None, Heartbeats().give(), giver.give())] == [3, 0, 0]
