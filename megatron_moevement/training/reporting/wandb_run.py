# SPDX-License-Identifier: Apache-2.0
"""Which run of Weights & Biases a job's scalars go to: one, over its restarts and launches."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_moevement.training.reporting.arguments import LoggingConfig

if TYPE_CHECKING:
    from megatron_moevement.training.arguments import Arguments

_ID_DIGITS = 16
_OWN_WORDS: Mapping[str, str] = {"id": "WANDB_RUN_ID", "resume": "WANDB_RESUME"}
"""By argument of `wandb.init` the variable by which a user decides it instead."""


@dataclasses.dataclass(frozen=True)
class WandbRun:
    """A job, as Weights & Biases is to show it.

    Attributes:
        run_id: of the job, the same in every generation and launch of it; None where nothing lets
            a later launch go on from this one, so that each is a run of its own.
        settings: the arguments of the job by their names, of types that JSON has.
    """

    run_id: str | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


NO_LATER_LAUNCH = WandbRun()
"""A job that nothing goes on with."""


def init_arguments(
    config: LoggingConfig, run: WandbRun, directory: str, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Returns what `wandb.init` is called with.

    Args:
        directory: where Weights & Biases keeps its files.
        environment: of the process; what it says of id and resumption is left to it.
    """
    arguments: dict[str, Any] = {
        "dir": directory,
        "name": config.wandb_exp_name,
        "project": config.wandb_project,
        "entity": config.wandb_entity or None,
        "config": dict(run.settings),
    }
    if run.run_id is not None:
        arguments |= {"id": _id_of(run.run_id, config), "resume": "allow"}
    return {
        name: value
        for name, value in arguments.items()
        if _OWN_WORDS.get(name, "") not in environment
    }


def _id_of(run_id: str, config: LoggingConfig) -> str:
    """Returns the id of a job's run: another one where it goes to another place or name."""
    place = (run_id, config.wandb_entity, config.wandb_project, config.wandb_exp_name)
    return hashlib.sha256(json.dumps(place).encode()).hexdigest()[:_ID_DIGITS]


def settings_of(arguments: Arguments) -> dict[str, Any]:
    """Returns all settings of a job by the names of their flags, of types that JSON has."""
    found: dict[str, Any] = {"world_size": arguments.world_size}
    for field in dataclasses.fields(arguments):
        topic = getattr(arguments, field.name)
        if field.name == "data":
            topic = topic.flags
        if dataclasses.is_dataclass(topic):
            found |= {each.name: getattr(topic, each.name) for each in dataclasses.fields(topic)}
    return {name: _plain(value) for name, value in sorted(found.items())}


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
