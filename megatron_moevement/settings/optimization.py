"""The optimizer and the schedules of its learning rate and weight decay."""

from __future__ import annotations

import dataclasses

from megatron_moevement.errors import UserError
from megatron_moevement.settings.flags import count, flag, not_negative, positive, probability


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
    lr_warmup_iters: int = not_negative(0, "iterations of linear warm-up")
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

    def warmup_iters(self, decay_iters: int) -> float:
        """Returns the iterations of warm-up."""
        if self.lr_warmup_fraction is not None:
            return self.lr_warmup_fraction * decay_iters
        return self.lr_warmup_iters


def check_optimization(optimization: Optimization, train_iters: int) -> None:
    """Checks what concerns the optimizer and its schedules.

    Raises:
        UserError: a value is missing or out of range.
    """
    if optimization.lr is None:
        raise UserError("--lr is missing: give the largest learning rate")
    for name in ("min_lr", "lr_warmup_init"):
        if getattr(optimization, name) > optimization.lr:
            option = f"--{name.replace('_', '-')} {getattr(optimization, name)}"
            raise UserError(f"{option} exceeds --lr {optimization.lr}")
    if optimization.lr_warmup_fraction is not None and optimization.lr_warmup_iters:
        raise UserError("--lr-warmup-fraction and --lr-warmup-iters exclude each other")
    decay_iters = optimization.lr_decay_iters or train_iters
    if optimization.warmup_iters(decay_iters) >= decay_iters:
        raise UserError(
            f"the warm-up takes {optimization.warmup_iters(decay_iters):g} of {decay_iters} "
            "iterations; it must end before the decay does"
        )
    if optimization.lr_decay_style == "WSD":
        annealing = optimization.lr_wsd_decay_iters
        if annealing is None or annealing > decay_iters:
            raise UserError(
                f"--lr-decay-style WSD needs --lr-wsd-decay-iters, at most {decay_iters}"
            )
    _check_weight_decay(optimization)
    if optimization.override_opt_param_scheduler and (
        optimization.use_checkpoint_opt_param_scheduler
    ):
        raise UserError(
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler "
            "exclude each other"
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
