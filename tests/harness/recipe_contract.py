# SPDX-License-Identifier: Apache-2.0
"""What every state recipe and every access to master weights keeps, checked on one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from megatron_moevement.integrations.megatron.slot_layout import slot_layouts
from megatron_moevement.integrations.megatron.snapshots import LiveOperators
from megatron_moevement.policy.job.operators import Inventory
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.job.state_recipe import Content, Timing
from megatron_moevement.policy.window.ordering import Ordering, order_operators
from megatron_moevement.policy.window.window_planner import plan_window
from megatron_moevement.training.job import Job
from tests.harness.held_state import captured, held, train, wrong_after_loss


def broken_promises(job: Job) -> list[str]:
    """Trains a job of one rank, loses its state twice; returns what was not kept, in order."""
    train(job)
    live = LiveOperators(job.chunks, job.optimizer)
    promises = {
        "FULL put back gives the same bits": not wrong_after_loss(job, live, Content.FULL),
        "COMPUTE put back gives the same compute weights": not (
            wrong_after_loss(job, live, Content.COMPUTE) & held(job)[0].keys()
        ),
        "sizes are those of the captured bytes": all(_sizes(job, live)),
        "windows are planned and laid out by these sizes": all(_planned(live)),
        "each parameter has a master of its own": _masters(job),
    }
    return [promise for promise, is_kept in promises.items() if not is_kept]


def _sizes(job: Job, live: LiveOperators) -> Iterator[bool]:
    masters = sum(
        master.numel() for part in job.optimizer.parts for master in part.get_parameters()
    )
    for content in Content:
        bytes_of = {
            operator: sum(tensor.nbytes for tensor in tensors)
            for operator, tensors in captured(live, content).items()
        }
        buffers = sum(
            piece.size_bytes
            for operator in bytes_of
            for piece in live.pieces(operator, content)
            if piece.timing is Timing.AT_ONCE
        )
        each = job.optimizer.recipe.bytes_per_parameter(content)
        yield sum(bytes_of.values()) == each * masters + buffers
        for operator in live.operators:
            sizes = {Content.FULL: operator.full_bytes, Content.COMPUTE: operator.compute_bytes}
            yield bytes_of[operator.id] == sizes[content]


def _planned(live: LiveOperators) -> Iterator[bool]:
    rank = LogicalRank()
    inventory = Inventory({rank: live.operators})
    order = order_operators(inventory.sorted_operators, Ordering.INDEX)
    schedule = plan_window(inventory, order, window=3).schedule
    for layout, planned in zip(
        slot_layouts(schedule, rank, live), schedule.bytes_by_slot[rank], strict=True
    ):
        buffer = torch.zeros(layout.size_bytes, dtype=torch.uint8)
        filled = sum(view.nbytes for part in layout.parts for view in part.views(buffer))
        yield filled == layout.captured_bytes == planned


def _masters(job: Job) -> bool:
    """Whether each weight of the model follows from its own master, and none is left."""
    stepped = Counter(id(one) for part in job.optimizer.parts for one in part.get_parameters())
    found: Counter[int] = Counter()
    for chunk in job.chunks:
        for parameter in chunk.parameters():
            master = job.optimizer.master_of(parameter)
            if master is None or not torch.equal(
                master.detach().view(-1).to(parameter.dtype), parameter.detach().view(-1)
            ):
                return False
            found[id(master)] += 1
    return found == stepped
