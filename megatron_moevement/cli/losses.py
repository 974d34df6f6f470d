# SPDX-License-Identifier: Apache-2.0
"""`moevement losses`: the losses of a run, from its events, as a table and a picture."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence

from rich.table import Table

from megatron_moevement.cli.inputs import EVENT_DIR, damage_refused, events_in
from megatron_moevement.cli.output import add_json_flag, show
from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.training.data.manifest import read_manifest
from megatron_moevement.training.reporting.plots import (
    AT_END,
    VALIDATION,
    has_losses,
    losses_from_events,
    plot_losses,
)

HELP = "show the losses of a run"
DESCRIPTION = __doc__


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds its flags."""
    parser.add_argument("event_dir", metavar="DIR", help=EVENT_DIR)
    add_json_flag(parser, "every loss as JSON, for programs")
    parser.add_argument("--picture", metavar="FILE", help="draw the curves into this PNG")
    parser.add_argument(
        "--data", metavar="PREFIX", help="compare with the unigram entropy of these data"
    )
    parser.add_argument(
        "--below-entropy",
        metavar="NATS",
        type=float,
        help="fail unless the last validation losses are so far below that entropy, or farther",
    )


def run(args: argparse.Namespace) -> int:
    """Prints first and last losses; draws the curves and judges the last one if asked to."""
    margin = _margin(args)
    with damage_refused(args.event_dir):
        training, validation, final = losses_from_events(events_in(args.event_dir, has_losses))
    if not training:
        raise UserError(f"{args.event_dir} holds no events of iterations")
    table = Table("loss (nats per token)", "first", "last")
    for name, losses in (("training", training), (VALIDATION, validation)):
        if losses:
            first, last = min(losses), max(losses)
            table.add_row(name, f"{losses[first]:.4f} ({first})", f"{losses[last]:.4f} ({last})")
    for iteration, loss in final.items():
        table.add_row(VALIDATION + AT_END, "", f"{loss:.4f} ({iteration})")
    entropy = _unigram_entropy(args.data)
    if entropy is not None:
        table.add_row("unigram entropy of the data", "", f"{entropy:.4f}")
    document = {
        "training": _finite(training),
        "validation": _finite(validation),
        "validation_at_end": _finite(final),
        "unigram_entropy": entropy,
    }
    show(args, document, [table])
    if args.picture is not None:
        plot_losses(
            training,
            args.picture,
            validation=validation,
            final=final,
            unigram_entropy=entropy,
        )
    if entropy is None or margin is None:
        return ExitCode.DONE
    judgement, code = _judge([validation, final], entropy, margin)
    print(judgement, file=sys.stderr if args.json else sys.stdout)
    return code


def _finite(losses: Mapping[int, float]) -> dict[int, float | None]:
    """Returns losses as JSON has them: it knows no NaN and no infinity."""
    return {step: loss if math.isfinite(loss) else None for step, loss in losses.items()}


def _margin(args: argparse.Namespace) -> float | None:
    margin: float | None = args.below_entropy
    if margin is None:
        return None
    if args.data is None:
        raise UserError("--below-entropy needs --data: the entropy is that of the data")
    if not 0 <= margin < math.inf:
        raise UserError(f"--below-entropy {margin}: give a finite number of nats, 0 or more")
    return margin


def _judge(
    curves: Sequence[Mapping[int, float]], entropy: float, margin: float
) -> tuple[str, ExitCode]:
    """Returns whether the last validation losses are low enough; one that is no number is not.

    Args:
        curves: of each the last loss counts.
    """
    required = f"{margin} nats below the unigram entropy, {entropy:.4f}, are required"
    last = [losses[max(losses)] for losses in curves if losses]
    if not last:
        return f"no validation loss; {required}", ExitCode.FAILURE
    loss = max(last, key=lambda one: (math.isnan(one), one))
    low_enough = entropy - loss >= margin
    verdict = "low enough" if low_enough else "too high"
    told = f"validation loss {loss:.4f} is {verdict}: {required}"
    return told, ExitCode.DONE if low_enough else ExitCode.FAILURE


def _unigram_entropy(prefix: str | None) -> float | None:
    if prefix is None:
        return None
    manifest = read_manifest(prefix)
    if manifest is None:
        raise UserError(f"{prefix} has no manifest; `moevement data prepare` writes one")
    return manifest.unigram_entropy_nats
