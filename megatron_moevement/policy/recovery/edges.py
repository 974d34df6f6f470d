"""Window edges: what a recovery does to the schedule in force."""

from __future__ import annotations

from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.recovery.plan import Plan


def windows_start(plan: Plan, facts: Facts) -> int:
    """Returns the first step of a window of the schedule that a plan goes on with.

    A replay captures the slots of the window in flight again under that window's own schedule: a
    moved edge would pin the old window for ever where faults come closer than W steps.

    Args:
        plan: what is carried out.
        facts: that it was made from, of the newest history.
    """
    if plan.window is not None:
        return plan.window.start
    if plan.is_from_durable:
        return plan.first_captured
    held = (holding.window.start for process in facts.processes for holding in process.holdings)
    return min(held, default=plan.target)
