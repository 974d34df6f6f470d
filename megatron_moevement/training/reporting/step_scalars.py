# SPDX-License-Identifier: Apache-2.0
"""The scalars of a step that are drawn over iterations and over samples, by Megatron's names."""

from __future__ import annotations

from megatron_moevement.training.reporting.interval import LM_LOSS, StepReport


def scalars_over_samples(
    step: StepReport, *, global_batch_size: int, loss_scale: bool, world_size: int | None
) -> dict[str, float]:
    """Returns the scalars of a step.

    Args:
        loss_scale: whether the loss scale is one of them.
        world_size: the number of ranks; None: it is none of them.
    """
    scalars: dict[str, float] = {"batch-size": global_batch_size, LM_LOSS: step.loss}
    if step.learning_rate is not None:
        scalars["learning-rate"] = step.learning_rate
    if loss_scale:
        scalars["loss-scale"] = step.loss_scale
    if world_size is not None:
        scalars["world-size"] = world_size
    if step.grad_norm is not None:
        scalars["grad-norm"] = step.grad_norm
    return scalars | step.totals.scalars()
