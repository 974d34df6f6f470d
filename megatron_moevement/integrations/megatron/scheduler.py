# SPDX-License-Identifier: Apache-2.0
"""The schedules of learning rate and weight decay, advanced at the commit."""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.optimizer import SplitOptimizer
from megatron_moevement.runtime.coordination.ledger import ParameterGroup
from megatron_moevement.settings.optimization import Optimization
from megatron_moevement.settings.run import Run


class Scheduler:
    """Megatron's scheduler, with what the ledger and checkpoints need of it."""

    def __init__(self, megatron: OptimizerParamScheduler) -> None:
        self._megatron = megatron
        self._given = self._schedule()

    def advance(self, samples: int) -> None:
        """Moves on by the samples of a step and sets the values of the next one."""
        self._megatron.step(increment=samples)

    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """Returns the values that the next step uses, for each group of parameters."""
        return tuple(
            ParameterGroup(lr=float(group["lr"]), weight_decay=float(group["weight_decay"]))
            for group in self._megatron.optimizer.param_groups
        )

    def learning_rate(self) -> float:
        """Returns the learning rate of the first group that has parameters, as upstream logs it."""
        return self.parameter_groups()[0].lr

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the schedules."""
        return dict(self._megatron.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the position of a checkpoint; upstream's method adds it to the present one.

        Raises:
            UserError: the checkpoint's schedule is another one.
        """
        self._megatron.num_steps = 0
        try:
            self._megatron.load_state_dict(state)
        except AssertionError as error:  # how upstream says it
            raise UserError(
                f"the checkpoint has another schedule: {error}; give its flags, or "
                "--override-opt-param-scheduler, or --use-checkpoint-opt-param-scheduler"
            ) from error

    def position(self) -> dict[str, Any]:
        """Returns the position in the schedules, and these where the flags did not give them.

        A longer run has other flags and may have the same schedules.
        """
        schedule = {} if self._schedule() == self._given else self._schedule()
        return {**schedule, "num_steps": self._megatron.num_steps}

    def go_on_at(self, position: dict[str, Any]) -> None:
        """Takes what `position` returned in a process of the same run.

        Raises:
            UserError: that run took its schedules from a checkpoint, and this one does not.
        """
        if len(position) > 1:
            self.load_state_dict(position)
            return
        self._megatron.num_steps = 0
        self._megatron.step(increment=position["num_steps"])

    def _schedule(self) -> dict[str, Any]:
        state = dict(self._megatron.state_dict())
        del state["num_steps"]
        return state


def build_scheduler(
    optimization: Optimization, run: Run, optimizer: SplitOptimizer, global_batch_size: int
) -> Scheduler:
    """Builds the schedule of learning rate and weight decay; its unit is samples, as upstream's."""
    lengths = optimization.lengths(run)
    samples = 1 if run.train_samples is not None else global_batch_size
    decay = optimization.weight_decay
    constant = optimization.weight_decay_incr_style == "constant"
    start = decay if constant else optimization.start_weight_decay
    end = decay if constant else optimization.end_weight_decay
    return Scheduler(
        OptimizerParamScheduler(
            optimizer.megatron,
            init_lr=optimization.lr_warmup_init,
            max_lr=optimization.lr,
            min_lr=optimization.min_lr,
            lr_warmup_steps=lengths.warmup * samples,
            lr_decay_steps=lengths.decay * samples,
            lr_decay_style=optimization.lr_decay_style,
            start_wd=start,
            end_wd=end,
            wd_incr_steps=lengths.total * samples,
            wd_incr_style=optimization.weight_decay_incr_style,
            use_checkpoint_opt_param_scheduler=optimization.use_checkpoint_opt_param_scheduler,
            override_opt_param_scheduler=optimization.override_opt_param_scheduler,
            wsd_decay_steps=None if lengths.annealing is None else lengths.annealing * samples,
            lr_wsd_decay_style=optimization.lr_wsd_decay_style,
        )
    )
