# SPDX-License-Identifier: Apache-2.0
"""A real job, small enough for a test: the tiny preset, smaller still, on artificial data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from megatron_moevement.backends.backend import choose, load
from megatron_moevement.settings.launch import Launch
from megatron_moevement.training.arguments import Arguments, parse
from megatron_moevement.training.job import Job, build_job

_SMALL = (
    "--num-layers=2",
    "--hidden-size=32",
    "--ffn-hidden-size=64",
    "--seq-length=16",
    "--mock-data",
    "--tokenizer-type=NullTokenizer",
    "--vocab-size=96",
    "--micro-batch-size=2",
    "--global-batch-size=12",
    "--train-iters=8",
    "--lr=1e-2",
    "--eval-iters=0",
    "--num-workers=0",
)
TINY = ("--model-preset=tiny", *_SMALL, "--moe-ffn-hidden-size=32", "--num-experts=4")
"""Flags of the job; those of a test come after them and win."""

PLAIN = (*_SMALL, "--num-attention-heads=4", "--make-vocab-size-divisible-by=64")
"""A dense GPT by Megatron's defaults: learned positions, LayerNorm, GELU, biases, dropout."""


def tiny_arguments(*flags: str, world_size: int = 1, base: Sequence[str] = TINY) -> Arguments:
    """Returns the parsed flags of a tiny job."""
    return parse([*base, *flags], world_size)


@contextlib.contextmanager
def tiny_job(*flags: str, base: Sequence[str] = TINY) -> Iterator[Job]:
    """Builds this rank's part of a tiny job, and leaves the job at the end.

    The backend must be installed before this module is imported.

    Args:
        flags: of the test; they win.
        base: the flags that come before them.
    """
    from megatron_moevement.integrations.megatron.process_groups import (  # noqa: PLC0415
        leave_job,
    )

    launch = Launch.from_environment()
    arguments = tiny_arguments(*flags, world_size=launch.world_size, base=base)
    try:
        yield build_job(arguments, launch, load(choose(arguments.run.moevement_backend)))
    finally:
        leave_job()
