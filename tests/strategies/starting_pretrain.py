# SPDX-License-Identifier: Apache-2.0
"""The training program of which one process dies in its start or end: `--dies-at=PLACE:PROCESS`."""

import os
import signal
import sys
import time
from functools import partial

from nvidia_resiliency_ext.inprocess.monitor_process import MonitorProcess

from megatron_moevement.integrations.nvrx.control_store import ControlStore, GenerationStore
from megatron_moevement.integrations.nvrx.retries import BoundedRetries
from megatron_moevement.runtime.coordination.roll_call import RollCall
from megatron_moevement.settings.launch import Launch
from megatron_moevement.strategies.moevement.protection.resident_store import ResidentStore
from megatron_moevement.training.program import main

PREFIX = "--dies-at="
PLACES = {
    "imports": None,
    "roll": (RollCall, "call"),
    "monitor": (MonitorProcess, "__init__"),
    "barrier": (ControlStore, "initial_barrier"),
    "counted": (MonitorProcess, "can_create_store"),
    "state": (ControlStore, "send_state"),
    "key": (ControlStore, "send_key"),
    "unwatched": (MonitorProcess, "start"),
    "unsaid": (MonitorProcess, "start_iteration"),
    "watched": (BoundedRetries, "__call__"),
    "awaited": (GenerationStore, "completion_barrier"),
    "done": (GenerationStore, "completion_barrier"),
    "end": (ResidentStore, "close"),
}
"""What a process is about to call when it dies, in the order of a run."""
END_S = 1
"""The others have ended by then, unless they wait."""


def die(*_, **__):
    """Ends the process as the system does it that has no memory left."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_last(*_, **__):
    """Ends the process after the others."""
    time.sleep(END_S)
    die()


def die_awaited(store, *, rendezvous_count, **_):
    """Ends the process when all others wait for it."""
    others = set(range(rendezvous_count)) - {Launch.from_environment().process}
    at_barrier = partial(store.is_rank_at_reentrant_barrier, group_name=store.COMPLETION_BARRIER)
    while not all(at_barrier(rank) for rank in others):
        time.sleep(0.01)
    die()


def linger():
    """Takes long, in which an interrupt may come."""
    for _ in range(30):
        time.sleep(0.1)


def after(function, then):
    """Returns a function that does something after another one."""

    def both(*args, **kwargs):
        function(*args, **kwargs)
        then()

    return both


HOW = {
    "awaited": die_awaited,
    "done": after(GenerationStore.completion_barrier, die),
    "end": die_last,
}
"""Where a process dies otherwise than at once."""


if __name__ == "__main__":
    (given,) = [argument for argument in sys.argv if argument.startswith(PREFIX)]
    place, number = given.removeprefix(PREFIX).split(":")
    if Launch.from_environment().process == int(number):
        if PLACES[place] is None:
            die()
        assert hasattr(*PLACES[place]), place
        setattr(*PLACES[place], HOW.get(place, die))
    elif place == "done" and Launch.from_environment().process == 0:
        setattr(*PLACES[place], after(GenerationStore.completion_barrier, linger))
    sys.exit(main([argument for argument in sys.argv[1:] if argument != given]))
