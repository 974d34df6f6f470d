"""Window edges: what a recovery does to the schedule in force."""

from __future__ import annotations

import dataclasses

from megatron_moevement.policy.plan import Plan, WindowEdges
from megatron_moevement.policy.schedule import WindowSchedule


def schedule_after(plan: Plan, schedule: WindowSchedule) -> WindowSchedule:
    """Returns the schedule that is in force once a plan is carried out.

    A replay captures the slots of the window in flight again under that window's own schedule: a
    moved edge would pin the old window for ever where faults come closer than W steps. Only where
    no window is left to replay from, a first one begins anew.
    """
    if plan.edges is WindowEdges.KEPT:
        return schedule
    return dataclasses.replace(schedule, epoch=plan.epoch, first_step=plan.first_captured)
