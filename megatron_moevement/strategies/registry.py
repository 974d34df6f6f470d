# SPDX-License-Identifier: Apache-2.0
"""Registry: the strategies by name, and the only file that names them.

The command line takes its choices from here before torch may be imported, so a strategy is imported
when its process begins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from megatron_moevement.settings.fault_tolerance import OFF, FaultTolerance

if TYPE_CHECKING:
    from megatron_moevement.strategies.resident_state import ResidentState


@dataclasses.dataclass(frozen=True)
class Registered:
    """A strategy that `--moevement-strategy` can name.

    Attributes:
        begin: returns what a process keeps for it; called once in a process.
        sizes: fields of `FaultTolerance` that decide what the bytes in its memory mean; with its
            name they are part of the identity of a store.
    """

    begin: Callable[[FaultTolerance], ResidentState]
    sizes: frozenset[str] = frozenset()


def _off(settings: FaultTolerance) -> ResidentState:
    from megatron_moevement.strategies.resident_state import ResidentState  # noqa: PLC0415

    del settings
    return ResidentState()


def _moevement(settings: FaultTolerance) -> ResidentState:
    from megatron_moevement.strategies.moevement.opening import MoEvement  # noqa: PLC0415

    return MoEvement(settings)


_REGISTERED = {
    OFF: Registered(_off),
    "moevement": Registered(
        _moevement, frozenset({"moevement_min_window", "moevement_max_window"})
    ),
}
STRATEGIES: Mapping[str, Registered] = MappingProxyType(_REGISTERED)
"""By name."""


def register(name: str, strategy: Registered) -> None:
    """Adds a strategy; call it before the command line is read.

    Raises:
        ValueError: there is one of this name.
    """
    if name in _REGISTERED:
        raise ValueError(f"there is a strategy {name!r}")
    _REGISTERED[name] = strategy
