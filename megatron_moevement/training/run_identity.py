# SPDX-License-Identifier: Apache-2.0
"""The identity of a run: what decides its bits, the data's content included, and nothing else.

It names the folder of the run's memory, so that a launch goes on from the memory of its own run
only. Flags are sorted in `deciding.py`. What several of them decide together is in here as what it
comes to: the data by their content, wherever they lie; the number of steps by the learning rate
and the order of samples that it leads to; a checkpoint to begin with by what is in it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

import megatron_moevement
from megatron_moevement.backends.backend import choose
from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.fork.series import load_series
from megatron_moevement.runtime.coordination.agreement import as_user_error, gather_together
from megatron_moevement.runtime.slots.store_identity import DEVICE, TORCH, RunIdentity
from megatron_moevement.settings.run import num_microbatches
from megatron_moevement.strategies.registry import STRATEGIES
from megatron_moevement.training.arguments import Arguments
from megatron_moevement.training.data.splits import training_data
from megatron_moevement.training.deciding import DECIDING
from megatron_moevement.training.origin import find_origin

_ORIGIN = "begins with"


def agree_on_identity(arguments: Arguments, device: torch.device) -> RunIdentity:
    """Returns the identity of a run that begins, the same on all ranks; every rank calls it.

    One rank reads data and checkpoints, once in the life of a job.

    Raises:
        UserError: on all ranks: the data can't be read.
    """
    with as_user_error():
        told = gather_together(
            lambda: identify(arguments).document() if dist.get_rank() == 0 else None, device
        )
    return RunIdentity.of_document(told[0])


def flags_digest(arguments: Arguments) -> str:
    """Returns what stands for the flags that decide bits."""
    return hashlib.sha256(_text(given(arguments)).encode()).hexdigest()


def check_flags(digests: Sequence[str]) -> None:
    """Checks that all processes have the same flags.

    Raises:
        UserError: they differ.
    """
    unlike = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if unlike:
        raise UserError(
            f"flags that decide bits differ between ranks 0 and {unlike[0]}: give all processes "
            "of a job the same"
        )


def identify(arguments: Arguments) -> RunIdentity:
    """Returns the identity of the run that a process by itself finds.

    Raises:
        UserError: the data are damaged or too small.
    """
    deciding = given(arguments)
    per_step = _global_batch_size(arguments)
    steps = int(arguments.run.train_iters or 0)
    try:
        deciding["training data"] = training_data(
            arguments.data, steps * per_step, seed=arguments.run.seed
        )
    except OSError as error:
        raise UserError(f"can't read the data: {error}") from error
    texts = {name: _text(value) for name, value in deciding.items()}
    lineage = RunIdentity(texts, {}).portable_digest
    texts[_ORIGIN] = find_origin(arguments.checkpointing, lineage)
    settings = arguments.fault_tolerance
    sizes = STRATEGIES[settings.moevement_strategy].sizes
    layout = {
        _flag(name): _text(getattr(settings, name)) for name in ("moevement_strategy", *sizes)
    }
    return RunIdentity(texts, layout)


def checkpoint_mark(identity: RunIdentity) -> dict[str, str]:
    """Returns what a checkpoint of a run tells of it, for `find_origin` to read."""
    rest = {name: text for name, text in identity.deciding.items() if name != _ORIGIN}
    return {"lineage": RunIdentity(rest, {}).portable_digest, "origin": identity.deciding[_ORIGIN]}


def given(arguments: Arguments) -> dict[str, Any]:
    """Returns what decides bits and needs no look at files, by its name."""
    values: dict[str, Any] = {}
    groups = (
        arguments.architecture,
        arguments.moe,
        arguments.transformer,
        arguments.parallelism,
        arguments.precision,
        arguments.run,
        arguments.optimization,
    )
    for group in groups:
        deciding = DECIDING[type(group)]
        defaults = {field.name: field.default for field in dataclasses.fields(group)}
        for name in sorted(deciding.bits | deciding.later):
            value = getattr(group, name)
            if name in deciding.bits or value != defaults[name]:
                values[_flag(name)] = value
    data = arguments.data
    return values | {
        "--seq-length": data.seq_length,
        "--make-vocab-size-divisible-by": data.flags.make_vocab_size_divisible_by,
        "--reset-position-ids": data.flags.reset_position_ids,
        "--eod-mask-loss": data.flags.eod_mask_loss,
        "--vocab-size": data.vocab_size,
        "tokenizer": dict(data.tokenizer.unique_identifiers),
        "ranks": arguments.world_size,
        "--global-batch-size": _global_batch_size(arguments),
        DEVICE: choose(arguments.run.moevement_backend).value,
        TORCH: torch.__version__,
        "software": _software(),
        **_schedules(arguments),
    }


def _schedules(arguments: Arguments) -> dict[str, Any]:
    """Returns the steps over which learning rate and weight decay change; none where they don't.

    They are in iterations, or in samples where the run's length is.
    """
    optimization = arguments.optimization
    lengths = optimization.lengths(arguments.run)
    unit = "" if arguments.run.train_samples is None else " samples"
    decays = optimization.lr_decay_style != "constant"
    by_share = optimization.lr_warmup_fraction is not None
    grows = optimization.weight_decay_incr_style != "constant"
    return {
        "steps of the learning rate": _length(lengths.decay, unit) if decays or by_share else None,
        "steps of the weight decay": _length(lengths.total, unit) if grows else None,
    }


def _length(steps: int, unit: str) -> int | str:
    return f"{steps}{unit}" if unit else steps


def _global_batch_size(arguments: Arguments) -> int:
    run = arguments.run
    ranks = arguments.parallelism.data_parallel_size(arguments.world_size)
    return num_microbatches(run, ranks) * int(run.micro_batch_size or 0) * ranks


def _software() -> dict[str, str]:
    """Returns versions besides torch's; libraries below torch belong to the guarantee."""
    series = load_series()
    patches = "".join(patch.digest for patch in series.patches)
    return {
        "moevement": megatron_moevement.__version__,
        "megatron-core": series.upstream.tag,
        "patches": hashlib.sha256(patches.encode()).hexdigest()[:16],
    }


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else str(value)
