# SPDX-License-Identifier: Apache-2.0
"""What is taken of a checkpoint: of one that Megatron-LM wrote, and of our own by their format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.unsharded_state import (
    OWN_FORMAT,
    UnshardedState,
    read_unsharded_state,
)
from megatron_moevement.training.megatron_arguments import described_model, other_kind
from megatron_moevement.training.model_description import model_differences

_OLD_FORMAT = "mp_rank_0"
_MODEL_ARGUMENTS = ("num_layers", "hidden_size", "num_attention_heads")


def damage_without_list(checkpoint: Path) -> str | None:
    """Returns why a checkpoint without a list of its files can't be used.

    Megatron-LM makes no list. What it writes has no checksums, so damage is found at loading.
    """
    if any(checkpoint.glob(f"{_OLD_FORMAT}*")):
        return (
            "it is in Megatron-LM's format torch; "
            "Megatron-LM's --ckpt-convert-format torch_dist converts it"
        )
    common = read_unsharded_state(checkpoint)
    if common is None or common.own is not None:
        return "it has no list of its files"
    missing = [name for name in ("metadata.json", ".metadata") if not (checkpoint / name).is_file()]
    return f"{missing[0]} is missing" if missing else None


def check_loadable(checkpoint: Path, common: UnshardedState, model: Mapping[str, Any]) -> None:
    """Checks that a checkpoint is of a model and of a format that is known here.

    Raises:
        UserError: it is not.
    """
    own = common.own
    if own is None:
        _check_megatrons(checkpoint, common)
        theirs = described_model(common.args)
    else:
        if own.get("format", 1) > OWN_FORMAT:
            raise UserError(
                f"checkpoint {checkpoint} has format {own['format']} and this version reads "
                f"formats up to {OWN_FORMAT}: load it with the version that saved it"
            )
        theirs = own["model"]
    different = model_differences(model, theirs)
    if different:
        raise UserError(f"checkpoint {checkpoint} is of another model: {'; '.join(different)}")


def _check_megatrons(checkpoint: Path, common: UnshardedState) -> None:
    args = common.args
    if any(args.get(name) is None for name in _MODEL_ARGUMENTS):
        raise UserError(
            f"checkpoint {checkpoint} has no description of its model: args of common.pt "
            "has none of Megatron-LM's arguments"
        )
    other = other_kind(args)
    if other:
        raise UserError(
            f"checkpoint {checkpoint} is of a model that is not covered: {', '.join(other)}"
        )


def own_part_of(
    common: UnshardedState, adam_step: int | None, *, is_release: bool = False
) -> dict[str, Any]:
    """Returns what training goes on with from Megatron-LM's checkpoint, as our own ones keep it.

    Args:
        adam_step: what the loaded optimizer counts, None without it.
        is_release: a converter wrote it: training begins with its weights.
    """
    iteration = 0 if is_release else common.iteration
    skipped = 0 if adam_step is None else max(iteration - adam_step, 0)
    samples = 0 if is_release else int(common.args.get("consumed_train_samples") or 0)
    progress = {"committed": iteration, "consumed_samples": samples, "skipped": skipped}
    return {"progress": progress, "losses": {}, "iteration": iteration}


def what_was_taken(
    checkpoint: Path, own: Mapping[str, Any], *, optimizer: bool, random_state: bool, position: bool
) -> str:
    """Returns the line that tells what of Megatron-LM's checkpoint is taken and what is not.

    Args:
        position: whether iteration and samples are taken.
    """
    progress = own["progress"]
    place = f"iteration {progress['committed']} and {progress['consumed_samples']} consumed samples"
    parts = {
        "the weights": True,
        "the optimizer's state and the schedules": optimizer,
        place: position,
        "the random streams": random_state,
        "the losses of earlier iterations": False,
    }
    taken = ", ".join(name for name, is_taken in parts.items() if is_taken)
    left = ", ".join(name for name, is_taken in parts.items() if not is_taken)
    return f"checkpoint {checkpoint} is Megatron-LM's: taken are {taken}; not taken are {left}"
