# SPDX-License-Identifier: Apache-2.0
"""Durable checkpoints: where they are, how often, and what is taken from them."""

from __future__ import annotations

import dataclasses

from megatron_moevement.settings.checks import Checks
from megatron_moevement.settings.flags import count, flag, not_negative


@dataclasses.dataclass(frozen=True)
class Checkpointing:
    """Saving and loading of durable checkpoints."""

    save: str | None = flag(None, "folder for checkpoints", metavar="DIR")
    load: str | None = flag(None, "folder with checkpoints to resume from", metavar="DIR")
    save_interval: int | None = count(None, "iterations between checkpoints")
    save_retain_interval: int | None = count(
        None, "keep only checkpoints at multiples of this, and the newest"
    )
    async_save: bool = flag(
        False, "write checkpoints beside training, from a copy of the state in host memory"
    )
    ckpt_format: str = flag("torch_dist", "format of checkpoints", choices=("torch_dist",))
    ckpt_step: int | None = not_negative(None, "load this iteration instead of the newest")
    finetune: bool = flag(False, "take the weights alone and start at iteration 0")
    no_save_optim: bool = flag(False, "do not save the optimizer's state; see --no-load-optim")
    no_save_rng: bool = flag(False, "do not save the random streams; see --no-load-rng")
    no_load_optim: bool = flag(False, "do not load the optimizer's state")
    no_load_rng: bool = flag(False, "do not load the random number generators' state")
    use_checkpoint_args: bool = flag(
        False, "take flags of the network that are not given from the checkpoint"
    )
    exit_on_missing_checkpoint: bool = flag(
        False, "fail when --load holds no checkpoint, instead of starting from the initial weights"
    )

    @property
    def left_out(self) -> tuple[str, ...]:
        """What saved checkpoints lack, by the last word of its flags."""
        parts = {"optim": self.no_save_optim, "rng": self.no_save_rng}
        return tuple(name for name, is_left_out in parts.items() if is_left_out)


def check_checkpointing(checkpointing: Checkpointing) -> None:
    """Checks what concerns checkpoints, without touching the disk.

    Raises:
        UserError: a flag lacks its folder.
    """
    checks = Checks()
    for name in ("save_interval", "save_retain_interval"):
        value = getattr(checkpointing, name)
        if value is not None and checkpointing.save is None:
            checks.refuse(f"--{name.replace('_', '-')} needs --save DIR")
    for name in ("ckpt_step", "finetune", "use_checkpoint_args", "exit_on_missing_checkpoint"):
        if getattr(checkpointing, name) not in (None, False) and checkpointing.load is None:
            checks.refuse(f"--{name.replace('_', '-')} needs --load DIR")
    checks.end()
