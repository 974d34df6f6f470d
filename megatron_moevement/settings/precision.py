# SPDX-License-Identifier: Apache-2.0
"""The number formats of training and the scaling of its loss."""

from __future__ import annotations

import dataclasses

from megatron_moevement.policy.job.state_recipe import NumberType
from megatron_moevement.settings.checks import Checks
from megatron_moevement.settings.flags import count, flag, positive


@dataclasses.dataclass(frozen=True)
class Precision:
    """Compute type and loss scaling."""

    bf16: bool = flag(False, "compute in bfloat16")
    fp16: bool = flag(False, "compute in float16, with dynamic loss scaling")
    loss_scale: float | None = positive(None, "a fixed loss scale instead of a dynamic one")
    initial_loss_scale: float = positive(2.0**32, "dynamic loss scale at the start")
    min_loss_scale: float = positive(1.0, "smallest dynamic loss scale")
    loss_scale_window: int = count(1000, "iterations without overflow before the scale grows")
    hysteresis: int = count(2, "overflows before the scale shrinks")
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "accumulate and reduce gradients in FP32 (always with --bf16)"
    )

    @property
    def compute_type(self) -> NumberType:
        """The type of the compute weights."""
        if self.bf16:
            return NumberType.BF16
        return NumberType.FP16 if self.fp16 else NumberType.FP32

    @property
    def reduces_in_fp32(self) -> bool:
        """Whether gradients are accumulated and reduced in FP32, as Megatron decides it."""
        return self.accumulate_allreduce_grads_in_fp32 or self.bf16


def check_precision(precision: Precision) -> None:
    """Checks what concerns precision alone.

    Raises:
        UserError: the flags contradict each other.
    """
    checks = Checks()
    if precision.bf16 and precision.fp16:
        checks.refuse("--bf16 and --fp16 exclude each other; give one of them")
    if precision.loss_scale is not None and precision.compute_type is NumberType.FP32:
        checks.refuse("--loss-scale scales nothing in FP32; drop it or give --fp16")
    if precision.min_loss_scale <= 0 or precision.min_loss_scale > precision.initial_loss_scale:
        checks.refuse(
            f"--min-loss-scale {precision.min_loss_scale} must be positive and at most "
            f"--initial-loss-scale {precision.initial_loss_scale}"
        )
    checks.end()
