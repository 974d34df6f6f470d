# SPDX-License-Identifier: Apache-2.0
"""The optimizer and the schedules of its learning rate and weight decay."""

from __future__ import annotations

import dataclasses

from megatron_moevement.errors import UserError
from megatron_moevement.settings.checks import Checks
from megatron_moevement.settings.flags import count, flag, not_negative, positive, probability
from megatron_moevement.settings.run import Run


@dataclasses.dataclass(frozen=True)
class Optimization:
    """Adam, clipping, learning rate and weight decay."""

    optimizer: str = flag("adam", "optimizer", choices=("adam",))
    lr: float | None = positive(None, "largest learning rate")
    min_lr: float = not_negative(0.0, "smallest learning rate")
    lr_decay_style: str = flag(
        "linear",
        "decay of the learning rate",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = count(None, "iterations of decay (default: --train-iters)")
    lr_decay_samples: int | None = count(None, "samples of decay (default: --train-samples)")
    lr_warmup_iters: int = not_negative(0, "iterations of linear warm-up")
    lr_warmup_samples: int = not_negative(0, "samples of linear warm-up, with --train-samples")
    lr_warmup_fraction: float | None = probability(
        None, "warm-up as a part of the decay iterations"
    )
    lr_warmup_init: float = not_negative(0.0, "learning rate at the start of the warm-up")
    lr_wsd_decay_style: str = flag(
        "exponential",
        "annealing at the end of WSD",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_wsd_decay_iters: int | None = count(None, "iterations of that annealing")
    lr_wsd_decay_samples: int | None = count(None, "samples of that annealing")
    override_opt_param_scheduler: bool = flag(
        False, "schedule by these flags, not by those in the checkpoint"
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, "take the schedule from the checkpoint instead of these flags"
    )
    weight_decay: float = not_negative(0.01, "weight decay")
    start_weight_decay: float | None = not_negative(None, "weight decay at the start")
    end_weight_decay: float | None = not_negative(None, "weight decay at the end")
    weight_decay_incr_style: str = flag(
        "constant", "growth of weight decay", choices=("constant", "linear", "cosine")
    )
    clip_grad: float = not_negative(1.0, "largest global gradient norm; 0: no clipping")
    adam_beta1: float = probability(0.9, "Adam's first beta")
    adam_beta2: float = probability(0.999, "Adam's second beta")
    adam_eps: float = positive(1e-8, "Adam's epsilon")

    def lengths(self, run: Run) -> Lengths:
        """Returns how long the schedules are, in what the run's length is given in."""
        if run.train_samples is not None:
            total, decay = run.train_samples, self.lr_decay_samples
            warmup, annealing = self.lr_warmup_samples, self.lr_wsd_decay_samples
        else:
            total, decay = int(run.train_iters or 0), self.lr_decay_iters
            warmup, annealing = self.lr_warmup_iters, self.lr_wsd_decay_iters
        decay = decay or total
        share = self.lr_warmup_fraction
        return Lengths(total, decay, warmup if share is None else share * decay, annealing)


@dataclasses.dataclass(frozen=True)
class Lengths:
    """How long schedules are, in iterations or in samples.

    Attributes:
        total: of the run, over which weight decay grows.
        annealing: at the end of WSD.
    """

    total: int
    decay: int
    warmup: float
    annealing: int | None


def check_optimization(optimization: Optimization, run: Run) -> None:
    """Checks what concerns the optimizer and its schedules, of a run that has a length.

    Raises:
        UserError: a value is missing or out of range.
    """
    checks = Checks()
    checks.passes(_check_learning_rate, optimization)
    checks.passes(_check_schedule, optimization, run)
    checks.passes(_check_weight_decay, optimization)
    if optimization.override_opt_param_scheduler and (
        optimization.use_checkpoint_opt_param_scheduler
    ):
        checks.refuse(
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler "
            "exclude each other"
        )
    checks.end()


def _check_learning_rate(optimization: Optimization) -> None:
    if optimization.lr is None:
        raise UserError("--lr is missing: give the largest learning rate")
    for name in ("min_lr", "lr_warmup_init"):
        if getattr(optimization, name) > optimization.lr:
            option = f"--{name.replace('_', '-')} {getattr(optimization, name)}"
            raise UserError(f"{option} exceeds --lr {optimization.lr}")


def _check_schedule(optimization: Optimization, run: Run) -> None:
    unit, other = ("samples", "iters") if run.train_samples is not None else ("iters", "samples")
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if getattr(optimization, f"{name}_{other}"):
            flag_of = f"--{name}_{other}".replace("_", "-")
            raise UserError(f"{flag_of} needs --train-{other}, and --train-{unit} is given")
    if optimization.lr_warmup_fraction is not None and getattr(optimization, f"lr_warmup_{unit}"):
        raise UserError(f"--lr-warmup-fraction and --lr-warmup-{unit} exclude each other")
    lengths = optimization.lengths(run)
    if lengths.warmup >= lengths.decay:
        words = "samples" if unit == "samples" else "iterations"
        raise UserError(
            f"the warm-up takes {lengths.warmup:g} of {lengths.decay} {words}; "
            "it must end before the decay does"
        )
    if optimization.lr_decay_style == "WSD" and not 0 < (lengths.annealing or 0) <= lengths.decay:
        raise UserError(
            f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}, at most {lengths.decay}"
        )


def _check_weight_decay(optimization: Optimization) -> None:
    if optimization.weight_decay_incr_style == "constant":
        return
    start, end = optimization.start_weight_decay, optimization.end_weight_decay
    if start is None or end is None:
        raise UserError(
            "--weight-decay-incr-style needs --start-weight-decay and --end-weight-decay"
        )
    if start > end:
        raise UserError(f"--start-weight-decay {start} exceeds --end-weight-decay {end}")
