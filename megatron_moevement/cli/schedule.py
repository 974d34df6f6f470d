# SPDX-License-Identifier: Apache-2.0
"""`moevement schedule`: prints the window that would be chosen, as a table and as a picture."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table

from megatron_moevement.cli.bandwidth_flags import GB, add_bandwidth_flags
from megatron_moevement.cli.inputs import read_text
from megatron_moevement.cli.output import add_json_flag, show
from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.policy.job.inventory_document import load_inventory
from megatron_moevement.policy.job.model_shape import Capture, ModelShape, inventory_of
from megatron_moevement.policy.job.operators import Inventory, OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.policy.window.bandwidth import PathBandwidth
from megatron_moevement.policy.window.ordering import Ordering, order_operators, scores_of
from megatron_moevement.policy.window.packing import Levelled
from megatron_moevement.policy.window.schedule_document import dump_schedule
from megatron_moevement.policy.window.skipping_schedule import ExpertOrder, skip_most
from megatron_moevement.policy.window.weight_gradients import (
    ExpertKernels,
    SkippedGradients,
    skipped_gradients,
)
from megatron_moevement.policy.window.window_planner import WindowPlan, plan_window
from megatron_moevement.settings.flags import AT_LEAST_1, NOT_NEGATIVE, reader

HELP = "print the window and its slots for a model"
DESCRIPTION = """
Prints in which slot of the window each part of a model is captured. The model is given by its
sizes, or by an inventory: {"ranks": {"pp0.dp0.tp0.cp0.ep0": {"layers.0.gate": [FULL bytes, COMPUTE
bytes], ...}, ...}, "tied": [["embedding", "head"]]}.
"""

_SIZE = reader(int, AT_LEAST_1)
_COUNT = reader(int, NOT_NEGATIVE)

_MODEL_FLAGS = {
    "num_layers": "decoder layers",
    "hidden_size": "width of the residual stream",
    "ffn_hidden_size": "inner width of a dense MLP",
    "vocab_size": "rows of the embedding",
    "num_experts": "routed experts of every layer (default: a dense model)",
    "moe_ffn_hidden_size": "inner width of one expert (default: that of a dense MLP)",
    "moe_shared_expert_intermediate_size": "inner width of all shared experts (default: none)",
}
_NEEDED = ("num_layers", "hidden_size", "vocab_size")
_LAYOUT_FLAGS = {
    "pp": ("--pipeline-model-parallel-size", "pipeline stages"),
    "tp": ("--tensor-model-parallel-size", "ranks that share each layer"),
    "cp": ("--context-parallel-size", "ranks that share each sequence"),
    "ep": ("--expert-model-parallel-size", "ranks that share the experts of a layer"),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `moevement schedule`."""
    model = parser.add_argument_group("model")
    model.add_argument("--inventory", type=Path, metavar="FILE", help="JSON, instead of sizes")
    for name, text in _MODEL_FLAGS.items():
        model.add_argument(_flag(name), type=_SIZE, metavar="N", help=text)
    model.add_argument("--swiglu", action="store_true", help="gated MLPs: three matrices, not two")
    model.add_argument(
        "--untie-embeddings-and-output-weights", action="store_true", help="a head of its own"
    )
    layout = parser.add_argument_group("layout")
    for name, (flag, text) in _LAYOUT_FLAGS.items():
        layout.add_argument(flag, dest=name, type=_SIZE, default=1, metavar="N", help=text)
    text = "ranks (default: the least)"
    layout.add_argument("--world-size", type=_SIZE, metavar="N", help=text)
    text = "what replicas capture of what they all hold (default: shard)"
    _add_choice(layout, "--capture", Capture, Capture.SHARD, text)
    _add_window_arguments(parser)
    add_json_flag(parser, "slots and bytes of all ranks as JSON; also an --inventory")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the slots")


def _add_window_arguments(parser: argparse.ArgumentParser) -> None:
    window = parser.add_argument_group("window")
    text = "slots (default: as few as --iteration-time hides)"
    window.add_argument("--moevement-window", type=_SIZE, metavar="W", help=text)
    add_bandwidth_flags(window)
    text = "copies of every slot, which share the network"
    window.add_argument("--moevement-replicas", type=_COUNT, default=2, metavar="R", help=text)
    text = "bytes of the upstream log of one iteration"
    window.add_argument("--log-bytes", type=_COUNT, default=0, metavar="N", help=text)
    text = "what decides which operators are FULL first"
    _add_choice(window, "--moevement-order", Ordering, Ordering.INDEX, text)
    window.add_argument(
        "--popularity", type=Path, metavar="FILE", help='JSON: {"layers.0.experts.1": 17, ...}'
    )
    window.add_argument("--capacities", type=Path, metavar="FILE", help="JSON, as --popularity")
    text = "what kernels leave out while experts are frozen: each one's weight gradients, or those"
    text += " of a layer's local experts once all are frozen, as grouped on a GPU (default: each)"
    _add_choice(window, "--expert-kernels", ExpertKernels, ExpertKernels.EACH, text)
    text = "bytes that slots share evenly (default: full-and-compute)"
    _add_choice(window, "--level", Levelled, Levelled.FULL_AND_COMPUTE, text)


def _add_choice(
    group: argparse._ArgumentGroup,
    name: str,
    kind: type[Enum],
    default: Enum,
    text: str,
) -> None:
    """Adds a flag that takes the value of a member of an enum."""
    values = [member.value for member in kind]
    group.add_argument(name, choices=values, default=default.value, help=text)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def run(args: argparse.Namespace) -> int:
    """Plans, prints the table and draws the picture."""
    if args.picture and args.picture.suffix != ".png":
        raise UserError(f"--picture {args.picture}: the name must end in .png")
    try:
        inventory = _inventory(args)
        tokens = _scores(args.popularity, inventory)
        plan = _plan(args, inventory, tokens)
    except ValueError as error:
        raise UserError(f"{error}; see moevement schedule --help") from error
    kernels = ExpertKernels(args.expert_kernels)
    skipped = skipped_gradients(plan.schedule, kernels, tokens or None)
    shown: list[RenderableType] = [_summary(plan, skipped), _table(plan, skipped)]
    if args.picture:
        _draw(plan, args.picture)
        shown.append(f"picture: {args.picture}")
    show(args, json.loads(dump_schedule(plan.schedule)), shown)
    return ExitCode.DONE


def _inventory(args: argparse.Namespace) -> Inventory:
    if args.inventory:
        return load_inventory(read_text(args.inventory), str(args.inventory))
    smallest = args.pp * args.tp * args.cp * args.ep
    world_size = smallest if args.world_size is None else args.world_size
    if world_size % smallest:
        raise UserError(
            f"--world-size {world_size} must be a multiple of PP x TP x CP x EP = {smallest}"
        )
    sizes = {name: getattr(args, name) or 0 for name in _MODEL_FLAGS}
    sizes["moe_ffn_hidden_size"] = sizes["moe_ffn_hidden_size"] or sizes["ffn_hidden_size"]
    _check_sizes(sizes, args.ep)
    shape = ModelShape(
        **sizes,
        mlp_matrices=3 if args.swiglu else 2,
        tied_embeddings=not args.untie_embeddings_and_output_weights,
    )
    layout = Layout(args.pp, world_size // smallest, args.tp, args.cp, args.ep)
    return inventory_of(shape, layout, Capture(args.capture))


def _check_sizes(sizes: Mapping[str, int], ep: int) -> None:
    missing = [_flag(name) for name in _NEEDED if not sizes[name]]
    if not sizes["moe_ffn_hidden_size"]:
        missing.append(_flag("moe_ffn_hidden_size" if sizes["num_experts"] else "ffn_hidden_size"))
    if missing:
        raise UserError(f"give {', '.join(missing)}, or an --inventory instead of sizes")
    if sizes["num_experts"] % ep:
        raise UserError(
            f"--num-experts {sizes['num_experts']} must be a multiple of "
            f"--expert-model-parallel-size {ep}"
        )


def _plan(
    args: argparse.Namespace, inventory: Inventory, popularity: Mapping[OperatorId, float]
) -> WindowPlan:
    capacities = _scores(args.capacities, inventory)
    ordering = Ordering(args.moevement_order)
    if ordering is not Ordering.INDEX and not popularity:
        raise UserError(
            f"--moevement-order {ordering.value} needs --popularity FILE with what "
            "the experts are ordered by"
        )
    window, levelled = args.moevement_window, Levelled(args.level)
    by_index = plan_window(
        inventory,
        order_operators(inventory.operators, Ordering.INDEX),
        budget_bytes=_budget_bytes(args) if window is None else None,
        window=window,
        levelled=levelled,
    )
    if ordering is Ordering.INDEX:
        return by_index
    experts = (one for one in inventory.operators if one.kind is OperatorKind.EXPERT)
    scores = scores_of(experts, ordering, popularity, capacities)
    order = ExpertOrder(ExpertKernels(args.expert_kernels), scores, popularity)
    return skip_most(by_index, order, levelled=levelled)


def _budget_bytes(args: argparse.Namespace) -> int:
    if args.iteration_time is None or args.bandwidth is None:
        raise UserError("give --iteration-time and --bandwidth, or --moevement-window")
    network = float("inf") if args.network_bandwidth is None else args.network_bandwidth * GB
    path = PathBandwidth(args.bandwidth * GB, network, args.moevement_replicas, args.log_bytes)
    return path.slot_budget_bytes(timedelta(seconds=args.iteration_time))


def _scores(path: Path | None, inventory: Inventory) -> dict[OperatorId, float]:
    if path is None:
        return {}
    try:
        document: Any = json.loads(read_text(path))
        scores = {OperatorId.parse(name): float(score) for name, score in document.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f'{path} must look like {{"layers.0.experts.1": 17, ...}}: {error}'
        ) from error
    strange = sorted(scores.keys() - inventory.operators)
    if strange:
        raise UserError(f"{path}: the model has no {strange[0]} ({len(strange)} in all)")
    return scores


def _summary(plan: WindowPlan, skipped: SkippedGradients) -> str:
    size, schedule = plan.size, plan.schedule
    ranks = len(schedule.inventory.ranks)
    lines = [
        f"W = {size.window} for {len(schedule.slots)} operators on "
        f"{ranks} rank{'s' if ranks > 1 else ''}",
        f"largest slot {decimal(size.worst_slot_bytes)}, at least "
        f"{decimal(size.lower_bound_bytes)} in any packing",
    ]
    if skipped.by_step:
        lines.append(
            f"a replayed window leaves out {skipped.share:.0%} of its weight gradients in "
            f"{len(skipped.by_step)} of its steps"
        )
    if size.budget_bytes is not None:
        verdict = "every slot fits" if size.fits else "the largest slot does NOT fit: stalls"
        lines.append(f"an iteration hides {decimal(size.budget_bytes)}: {verdict}")
    return "\n".join([*lines, f"digest {schedule.digest}"])


_TITLES = {
    "experts": {OperatorKind.EXPERT},
    "gates": {OperatorKind.GATE},
    "rest": {OperatorKind.NON_EXPERT},
    "ends": {OperatorKind.EMBEDDING, OperatorKind.HEAD},
}


def _table(plan: WindowPlan, skipped: SkippedGradients) -> Table:
    """Returns one row for each slot: what is in it and what it weighs on its worst rank.

    What is skipped is left out in the step that a replay does behind the slot.
    """
    schedule, size = plan.schedule, plan.size
    table = Table(box=None, padding=(0, 1, 0, 0))
    budget = ["of\nbudget"] if size.budget_bytes else []
    for title in ("slot", *_TITLES, "COMPUTE", "worst", *budget, "weight\ngradients\nskipped"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("worst rank", no_wrap=True)
    for slot in range(schedule.window):
        count = Counter(operator.kind for operator in schedule.full[slot])
        worst = max(schedule.inventory.ranks, key=lambda rank: schedule.bytes_by_slot[rank][slot])
        slot_bytes = schedule.bytes_by_slot[worst][slot]
        table.add_row(
            str(slot),
            *(str(sum(count[kind] for kind in kinds)) for kinds in _TITLES.values()),
            str(len(schedule.compute[slot])),
            decimal(slot_bytes),
            *([f"{slot_bytes / size.budget_bytes:.0%}"] if size.budget_bytes else []),
            f"{skipped.shares[slot]:.0%}" if slot < len(skipped.shares) else "-",
            str(worst),
        )
    return table


def _draw(plan: WindowPlan, path: Path) -> None:
    from megatron_moevement.cli.schedule_picture import draw_schedule  # noqa: PLC0415  (heavy)

    try:
        draw_schedule(plan, path)
    except OSError as error:
        raise UserError(f"--picture {path}: {error.strerror or error}") from error
