# SPDX-License-Identifier: Apache-2.0
"""The training program on a machine whose clock is set: `--set-clock=PROCESS:STEP:SECONDS`.

The clock of the wall jumps by so many seconds when the process comes to that step, for the process
and for the monitor beside it.
"""

import mmap
import struct
import sys
import time

from megatron_moevement.runtime.faults.fault_points import FaultPoints
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.settings.launch import Launch
from megatron_moevement.training.program import main

PREFIX = "--set-clock="
SECONDS = struct.Struct("d")


def set_clock(step, by_s):
    wall, strike = time.time, FaultPoints.strike
    added = mmap.mmap(-1, SECONDS.size)  # shared with the monitor, which is forked later

    def strike_and_jump(self, at, place):
        if (at, place) == (step, FaultPoint.PREPARE):
            SECONDS.pack_into(added, 0, by_s)
        strike(self, at, place)

    time.time = lambda: wall() + SECONDS.unpack_from(added)[0]
    FaultPoints.strike = strike_and_jump


if __name__ == "__main__":
    (given,) = [argument for argument in sys.argv if argument.startswith(PREFIX)]
    process, at, by = given.removeprefix(PREFIX).split(":")
    if Launch.from_environment().process == int(process):
        set_clock(int(at), float(by))
    sys.exit(main([argument for argument in sys.argv[1:] if argument != given]))
