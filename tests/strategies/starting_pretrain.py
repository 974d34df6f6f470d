"""The training program of which one process dies in its start or end: `--dies-at=PLACE:PROCESS`."""

import os
import signal
import sys
import time

from nvidia_resiliency_ext.inprocess.monitor_process import MonitorProcess

from megatron_moevement.integrations.nvrx.control_store import ControlStore
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


if __name__ == "__main__":
    (given,) = [argument for argument in sys.argv if argument.startswith(PREFIX)]
    place, number = given.removeprefix(PREFIX).split(":")
    if Launch.from_environment().process == int(number):
        if PLACES[place] is None:
            die()
        assert hasattr(*PLACES[place]), place
        setattr(*PLACES[place], die_last if place == "end" else die)
    sys.exit(main([argument for argument in sys.argv[1:] if argument != given]))
