# SPDX-License-Identifier: Apache-2.0
"""The picture of a window schedule: what each slot weighs on the worst rank, and on all ranks."""

from __future__ import annotations

import os
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_moevement.policy.window.schedule import WindowSchedule
from megatron_moevement.policy.window.window_planner import WindowPlan

_GB = 1e9


def draw_schedule(plan: WindowPlan, path: Path) -> None:
    """Draws the slots of a plan into a PNG; an existing file is replaced as a whole or not at all.

    Raises:
        OSError: the file can't be written.
    """
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    worst_rank, all_ranks = figure.subplots(1, 2)
    _draw_worst_rank(worst_rank, plan)
    _draw_all_ranks(figure, all_ranks, plan.schedule)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            canvas.print_png(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _draw_worst_rank(axes: Axes, plan: WindowPlan) -> None:
    """Stacks FULL and COMPUTE of each slot of the rank with the largest slot."""
    schedule = plan.schedule
    rank = max(schedule.inventory.ranks, key=lambda rank: max(schedule.bytes_by_slot[rank]))
    full = [0] * schedule.window
    for operator in schedule.inventory.by_rank[rank]:
        full[schedule.slots[operator.id]] += operator.full_bytes
    compute = [both - part for both, part in zip(schedule.bytes_by_slot[rank], full, strict=True)]
    slots = range(schedule.window)
    full_gb = [size / _GB for size in full]
    axes.bar(slots, full_gb, label="FULL")
    axes.bar(slots, [size / _GB for size in compute], bottom=full_gb, label="COMPUTE")
    if plan.size.budget_bytes is not None:
        axes.axhline(plan.size.budget_bytes / _GB, color="black", ls="--", label="an iteration")
    axes.set(title=f"worst rank, {rank}", xlabel="slot", ylabel="GB", xticks=list(slots))
    axes.legend(loc="lower right")


def _draw_all_ranks(figure: Figure, axes: Axes, schedule: WindowSchedule) -> None:
    ranks = schedule.inventory.ranks
    sizes = [[size / _GB for size in schedule.bytes_by_slot[rank]] for rank in ranks]
    image = axes.imshow(sizes, aspect="auto", interpolation="nearest", vmin=0)
    axes.set(title="all ranks", xlabel="slot", ylabel="rank", xticks=list(range(schedule.window)))
    figure.colorbar(image, ax=axes, label="GB")
