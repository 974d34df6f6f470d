"""Re-replication: every slot gets its holders back, the endangered ones first."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.persistence import SlotKey
from megatron_moevement.policy.placement import Host, place_replicas, repair_placement
from megatron_moevement.policy.ranks import LogicalRank
from megatron_moevement.policy.replication import Copy, Urgency, plan_replication
from megatron_moevement.policy.schedule import Window

HOSTS = [Host(number, str(number), LogicalRank(dp=number)) for number in range(4)]
SPARE = Host(4, "4")
WINDOW = Window(0, 2)


def slots_of(hosts):
    return [SlotKey(host.rank, WINDOW, number) for host in hosts for number in range(2)]


def holders_of(placement, hosts):
    process_of = {host.rank: host.process for host in hosts}
    return {
        slot: frozenset({process_of[slot.owner], *placement.holders[slot.owner]})
        for slot in slots_of(hosts)
    }


def test_nothing_is_copied_when_nothing_is_lost():
    placement = place_replicas(HOSTS, 2)
    plan = plan_replication(holders_of(placement, HOSTS), placement, HOSTS)
    assert (plan.copies, plan.under_replicated, plan.lost) == ((), {}, ())


@given(st.sets(st.integers(0, 3), min_size=1, max_size=2), st.integers(1, 2))
def test_after_a_loss_every_slot_that_is_left_gets_all_its_holders(lost, replicas):
    spares = [Host(4, "4"), Host(5, "5")]
    before = place_replicas([*HOSTS, *spares], replicas)
    held = holders_of(before, HOSTS)
    left = {slot: frozenset(p for p in holders if p not in lost) for slot, holders in held.items()}
    successors = dict(zip(sorted(lost), spares, strict=False))
    hosts = [
        Host(successors[h.process].process, successors[h.process].domain, h.rank)
        if h.process in lost
        else h
        for h in HOSTS
    ] + spares[len(lost) :]
    after = repair_placement(before, hosts)
    plan = plan_replication(left, after, hosts)
    now = {slot: set(holders) for slot, holders in left.items()}
    for copy in plan.copies:
        assert copy.source in left[copy.slot]
        now[copy.slot].add(copy.target)
    wanted = holders_of(after, [host for host in hosts if host.rank is not None])
    for slot, holders in now.items():
        assert (slot in plan.lost) == (not left[slot])
        assert slot in plan.lost or holders >= wanted[slot]
        missing = len(wanted[slot] - left[slot])
        assert slot in plan.lost or plan.under_replicated.get(slot, 0) == missing


def test_the_only_copy_is_doubled_before_training_and_into_another_domain():
    hosts = [HOSTS[0], Host(1, "0", LogicalRank(dp=1)), *HOSTS[2:]]  # 0 and 1 share a domain
    placement = place_replicas(hosts, 2)
    slot = SlotKey(LogicalRank(), WINDOW, 1)
    other = SlotKey(LogicalRank(), WINDOW, 0)
    plan = plan_replication({slot: frozenset({0, 1}), other: frozenset({0, 2})}, placement, hosts)
    urgent = [copy for copy in plan.copies if copy.urgency is Urgency.BEFORE_TRAINING]
    assert [copy.slot for copy in urgent] == [slot]
    assert urgent[0].target in {2, 3}
    assert plan.copies[: len(urgent)] == tuple(urgent)


def test_the_second_copy_goes_to_a_domain_without_one_first():
    hosts = [*HOSTS, Host(4, HOSTS[1].domain)]
    placement = place_replicas(HOSTS, 2)
    first, second = placement.holders[LogicalRank()]
    assert first == 1
    slot = SlotKey(LogicalRank(), WINDOW, 0)
    plan = plan_replication({slot: frozenset({4})}, placement, hosts)
    urgency = {copy.target: copy.urgency for copy in plan.copies}
    assert urgency[second] is Urgency.BEFORE_TRAINING
    assert urgency[first] is urgency[0] is Urgency.BACKGROUND


def test_a_lost_slot_is_reported_and_not_copied():
    placement = place_replicas(HOSTS, 2)
    slot = SlotKey(LogicalRank(), WINDOW, 0)
    plan = plan_replication({slot: frozenset({17})}, placement, HOSTS)
    assert (plan.copies, plan.lost) == ((), (slot,))


def test_sources_share_the_load_by_bytes():
    placement = place_replicas([*HOSTS, SPARE], 2)
    slots = [SlotKey(LogicalRank(), WINDOW, 0), SlotKey(LogicalRank(), WINDOW, 1)]
    slots.append(SlotKey(LogicalRank(), Window(2, 2), 0))
    first, second = placement.holders[LogicalRank()]
    held = {slot: frozenset({0, first}) for slot in slots}
    sizes = dict(zip(slots, (5, 2, 2), strict=True))
    plan = plan_replication(held, placement, [*HOSTS, SPARE], sizes)
    assert [copy.source for copy in plan.copies] == [0, first, first]
    assert {copy.target for copy in plan.copies} == {second}
    assert isinstance(plan.copies[0], Copy)
