# SPDX-License-Identifier: Apache-2.0
"""Adam that counts its steps once per group of parameters, as those of apex and TransformerEngine.

Both need a GPU. What matters of them for a recovery runs anywhere: the count is an entry of the
group, not of each parameter's state; the first step makes it; it goes on whichever parameters of
the group have a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from megatron_moevement.integrations.megatron import masters, optimizer

_MOMENTS = ("exp_avg", "exp_avg_sq")


class GroupStepAdam(torch.optim.Optimizer):
    """Adam with the step counted per group."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adam_w_mode: bool = True,
    ) -> None:
        """Takes what Megatron-Core gives to apex's.

        Args:
            params: parameters or groups of them.
            lr: the learning rate.
            betas: decay of both moments.
            eps: is added to the denominator.
            weight_decay: its factor.
            adam_w_mode: whether weight decay is apart from the gradient.
        """
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Counts, and moves every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            group["step"] = group["step"] + 1 if "step" in group else 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)

    def _move(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        for moment in _MOMENTS:
            if moment not in state:
                state[moment] = torch.zeros_like(parameter)
        mean, square = (state[moment] for moment in _MOMENTS)
        beta1, beta2 = group["betas"]
        if not self._adam_w_mode:
            gradient = gradient + group["weight_decay"] * parameter
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        step = group["step"]
        root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        update = mean / (1 - beta1**step) / root
        if self._adam_w_mode:
            update.add_(parameter, alpha=group["weight_decay"])
        parameter.sub_(update, alpha=group["lr"])


def install() -> None:
    """Makes Megatron-Core take it for apex's, in this process, for all optimizers from now on."""
    upstream, distributed = (
        vars(optimizer)["get_megatron_optimizer"].__globals__,
        vars(masters)["DistributedOptimizer"].__init__.__globals__,
    )
    _replace(upstream, Adam=GroupStepAdam, USING_PYTORCH_OPTIMIZER=False)
    _replace(distributed, Adam=GroupStepAdam, HAVE_APEX_OR_TE=True, USING_APEX_OPTIMIZER=True)


def _replace(names: dict[str, Any], **values: object) -> None:
    """Replaces names of an upstream module that chose between Adams when it was imported."""
    assert values.keys() <= names.keys(), f"{names['__name__']} has not all of {list(values)}"
    names.update(values)
