"""Flags of Megatron-LM that are understood and refused, each with its reason.

They would not work here, or they would break the promise that every recovery ends with the bits of
the fault-free run. An unknown flag is an error as well; these deserve a better answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from megatron_moevement.errors import UserError

REFUSALS: Mapping[str, str] = {
    "--rampup-batch-size": "a batch size that grows moves the data cursor of a replay",
    "--delay-wgrad-compute": "weight gradients would be computed after the commit barrier",
    "--overlap-moe-expert-parallel-comm": (
        "its schedule interleaves micro-batches, which the boundary log can't name"
    ),
    "--enable-cuda-graph": "a captured graph can't skip frozen operators",
    "--cuda-graph-impl": "a captured graph can't skip frozen operators",
    "--external-cuda-graph": "a captured graph can't skip frozen operators",
    "--mtp-num-layers": "multi-token prediction is not covered by the inventory yet",
    "--context-parallel-size": "context parallelism is not covered yet",
    "--use-megatron-fsdp": "its sharding is not covered by the inventory",
    "--use-torch-fsdp2": "its sharding is not covered by the inventory",
    "--optimizer-cpu-offload": "its optimizer state is not covered by the inventory",
    "--multi-latent-attention": "latent attention is not covered yet",
    "--async-save": "a save in the background is not covered yet; saves are synchronous",
    "--calculate-per-token-loss": "its extra reductions are not in the ledger yet",
    "--defer-embedding-wgrad-compute": "it keeps gradients across the commit barrier",
    "--num-distributed-optimizer-instances": "several optimizer instances are not covered yet",
    "--overlap-p2p-communication-warmup-flush": "its order of messages is not covered yet",
    "--train-samples": "the length of a run is given in iterations: --train-iters",
}
"""By flag the reason."""


class _Given(argparse.Action):
    """Notes that a refused flag was given; whatever its values, it takes them."""

    def __call__(self, parser: object, namespace: argparse.Namespace, *_: object) -> None:
        setattr(namespace, self.dest, True)


def _destination(flag: str) -> str:
    return "refused_" + flag.strip("-").replace("-", "_")


def add_refused_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the refused flags, without showing them in `--help`."""
    for flag in REFUSALS:
        parser.add_argument(
            flag,
            action=_Given,
            nargs="*",
            dest=_destination(flag),
            default=False,
            help=argparse.SUPPRESS,
        )


def refuse(values: argparse.Namespace) -> None:
    """Raises UserError with the reason if a refused flag was given."""
    for flag, reason in REFUSALS.items():
        if getattr(values, _destination(flag)):
            raise UserError(f"{flag} is not supported: {reason}")
