"""Flags of Megatron-LM that are understood and refused, each with its reason.

They would not work here, or they would break the promise that every recovery ends with the bits of
the fault-free run. An unknown flag is an error as well; these deserve a better answer.
"""

from __future__ import annotations

import argparse
import dataclasses

from megatron_moevement.errors import UserError


@dataclasses.dataclass(frozen=True)
class Refusal:
    """One refused flag."""

    flag: str
    reason: str


REFUSALS: tuple[Refusal, ...] = (
    Refusal("--rampup-batch-size", "a batch size that grows moves the data cursor of a replay"),
    Refusal("--delay-wgrad-compute", "weight gradients would be computed after the commit barrier"),
    Refusal(
        "--overlap-moe-expert-parallel-comm",
        "its schedule interleaves micro-batches, which the boundary log can't name",
    ),
    Refusal("--enable-cuda-graph", "a captured graph can't skip frozen operators"),
    Refusal("--cuda-graph-impl", "a captured graph can't skip frozen operators"),
    Refusal("--external-cuda-graph", "a captured graph can't skip frozen operators"),
    Refusal("--mtp-num-layers", "multi-token prediction is not covered by the inventory yet"),
    Refusal("--context-parallel-size", "context parallelism is not covered yet"),
    Refusal("--use-megatron-fsdp", "its sharding is not covered by the inventory"),
    Refusal("--use-torch-fsdp2", "its sharding is not covered by the inventory"),
    Refusal("--optimizer-cpu-offload", "its optimizer state is not covered by the inventory"),
    Refusal("--multi-latent-attention", "latent attention is not covered yet"),
    Refusal("--async-save", "a save in the background is not covered yet; saves are synchronous"),
    Refusal("--calculate-per-token-loss", "its extra reductions are not in the ledger yet"),
    Refusal("--defer-embedding-wgrad-compute", "it keeps gradients across the commit barrier"),
    Refusal(
        "--num-distributed-optimizer-instances", "several optimizer instances are not covered yet"
    ),
    Refusal("--overlap-p2p-communication-warmup-flush", "its order of messages is not covered yet"),
    Refusal("--train-samples", "the length of a run is given in iterations: --train-iters"),
)


class _Given(argparse.Action):
    """Notes that a refused flag was given; whatever its values, it takes them."""

    def __call__(self, parser: object, namespace: argparse.Namespace, *_: object) -> None:
        setattr(namespace, self.dest, True)


def _destination(refusal: Refusal) -> str:
    return "refused_" + refusal.flag.strip("-").replace("-", "_")


def add_refused_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the refused flags, without showing them in `--help`."""
    for refusal in REFUSALS:
        parser.add_argument(
            refusal.flag,
            action=_Given,
            nargs="*",
            dest=_destination(refusal),
            default=False,
            help=argparse.SUPPRESS,
        )


def refuse(values: argparse.Namespace) -> None:
    """Raises UserError with the reason if a refused flag was given."""
    for refusal in REFUSALS:
        if getattr(values, _destination(refusal)):
            raise UserError(f"{refusal.flag} is not supported: {refusal.reason}")
