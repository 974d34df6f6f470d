# SPDX-License-Identifier: Apache-2.0
"""Mends for NCCL that can be taken out, to see that jobs over the group show what each is for.

Each is replaced by what the program did before it, by name, in the process of a rank, before it
trains. Nothing in the program knows of it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from megatron_moevement.integrations.megatron import process_groups
from megatron_moevement.runtime.coordination.generation import Generation
from megatron_moevement.runtime.interrupts import group_calls, host_wait


def polled_results() -> None:
    """Reads what a collective gives without a look whether it has ended."""

    def read_at_once(work: Any) -> None:
        if work is not None:
            work.wait()

    _redefine(host_wait.await_on_host, read_at_once)


def connected_groups() -> None:
    """Lets each group connect when it is first used."""
    _redefine(process_groups.connect_groups, lambda groups, device, *, neighbours: None)


def closed_calls() -> None:
    """Leaves open what groups of calls an error has left open."""
    _redefine(group_calls.close_calls, lambda: None)


def connecting_thread() -> None:
    """Connects on the thread that a restart has to interrupt."""
    vars(process_groups)["interruptibly"] = lambda connect: connect()


def confirmed_steps() -> None:
    """Commits what a barrier gave, whether or not the job is interrupted."""
    _redefine(Generation.confirm, lambda self: None)


WITHOUT: dict[str, Callable[[], None]] = {
    f"without-{one.__name__.replace('_', '-')}": one
    for one in (
        polled_results,
        connected_groups,
        closed_calls,
        connecting_thread,
        confirmed_steps,
    )
}
"""What takes each of them out."""


def _redefine(function: Any, other: Any) -> None:
    """Gives a function another body, whoever has imported it by name."""
    assert isinstance(function, FunctionType)
    assert isinstance(other, FunctionType)
    function.__code__ = other.__code__
