# SPDX-License-Identifier: Apache-2.0
"""What a job tells of itself at its start: flags, model, layout, memory, run, protection, begin."""

from __future__ import annotations

import dataclasses
import logging

import torch.distributed as dist
from rich.filesize import decimal

from megatron_moevement.integrations.megatron.parameter_count import count_parameters
from megatron_moevement.integrations.megatron.weightless import state_bytes
from megatron_moevement.runtime.coordination.progress import Progress
from megatron_moevement.runtime.stores.place import store_place
from megatron_moevement.runtime.stores.store import folder_bytes
from megatron_moevement.settings.flags import flags_apart_from_defaults
from megatron_moevement.strategies.resident_state import ProcessStore
from megatron_moevement.strategies.strategy import Recovered, Strategy
from megatron_moevement.training.arguments import Arguments
from megatron_moevement.training.job import Job

logger = logging.getLogger(__name__)


def introduce(
    job: Job,
    strategy: Strategy,
    store: ProcessStore,
    *,
    start: Progress,
    recovered: Recovered | None,
    spares: int | None,
) -> None:
    """Tells the user about a job that is about to train; every rank calls it, in step.

    Args:
        store: the files of this process.
        start: where it begins.
        recovered: how far it is replayed from there; None: a checkpoint, or nothing, was loaded.
        spares: processes without a rank; None where there can be none.
    """
    total, routed = count_parameters(job.chunks, job.groups, job.device)
    if dist.get_rank() != 0:
        return
    lines = [
        *told_flags(job.arguments),
        told_model(job.arguments, total, routed),
        _layout(job, spares),
        f"memory: {decimal(state_bytes(job.chunks, job.optimizer))} of weights, gradients and "
        f"optimizer on {job.device}" + _kept(store),
        _run(job),
        f"protected by: {strategy.summary}",
        f"begins: {_begin(job, start, recovered)}",
    ]
    logger.info("%s", "\n".join(lines))


def told_flags(arguments: Arguments) -> list[str]:
    """Returns the flags that differ from their defaults, a line for each topic that has some."""
    topics = {
        field.name: getattr(arguments, field.name) for field in dataclasses.fields(arguments)
    } | {"data": arguments.data.flags}
    told = {
        name: flags_apart_from_defaults(group)
        for name, group in topics.items()
        if dataclasses.is_dataclass(group)
    }
    return [
        f"flags, {name.replace('_', ' ')}: {' '.join(flags)}"
        for name, flags in told.items()
        if flags
    ]


def told_model(arguments: Arguments, total: int, routed: int) -> str:
    """Returns what the model is.

    Args:
        total: its parameters.
        routed: those of them in routed experts, of which a token uses some.
    """
    architecture, moe = arguments.architecture, arguments.moe
    line = f"model: {total:,} parameters"
    if moe.num_experts:
        active = total - routed + routed * moe.moe_router_topk // moe.num_experts
        line += f", {active:,} active for a token: top {moe.moe_router_topk} of {moe.num_experts}"
        line += " experts"
    return f"{line}, {architecture.num_layers} layers, hidden size {architecture.hidden_size}"


def _layout(job: Job, spares: int | None) -> str:
    place, batches = job.position, job.batches
    sizes = {"PP": place.pp_size, "DP": place.dp_size, "TP": place.tp_size, "EP": place.ep_size}
    told = ", ".join(f"{name} {size}" for name, size in sizes.items())
    waiting = "" if spares is None else f", spares: {spares}"
    return (
        f"layout: {job.launch.world_size} ranks ({told}){waiting}; {batches.num_microbatches} "
        f"micro-batches of {batches.micro_batch_size}, global batch size "
        f"{batches.global_batch_size}"
    )


def _kept(store: ProcessStore) -> str:
    folder = store.folder
    if folder is None:
        return ""
    return f"; store {folder}, {decimal(folder_bytes(folder))} of this process"


def _run(job: Job) -> str:
    _, run_id = store_place(job.arguments.fault_tolerance, job.identity)
    saving = job.arguments.checkpointing
    return f"run: {run_id}, --save {saving.save or 'none'}, --load {saving.load or 'none'}"


def _begin(job: Job, start: Progress, recovered: Recovered | None) -> str:
    last = job.arguments.run.train_iters
    if recovered is not None:
        return (
            f"with step {recovered.target + 1} of {last}, from memory: the state after step "
            f"{start.committed}, replayed up to step {recovered.target}"
        )
    if start.committed:
        return f"with step {start.committed + 1} of {last}, from the checkpoint of that state"
    return f"with step 1 of {last}, from initial weights"
