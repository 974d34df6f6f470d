# SPDX-License-Identifier: Apache-2.0
"""The training program whose commits are torn on demand: `--torn-when=FOLDER`.

A rank that finds a file with its number in the folder removes it and fails in its next commit.
There, where nothing of a pass is left, a process that finds `PID.note` says in `PID.allocated` what
it has allocated: resident memory has holes that hide what is not given back.
"""

import ctypes
import gc
import os
import sys
from pathlib import Path

from megatron_moevement.policy.faults.fault_schedule import FaultKind
from megatron_moevement.runtime.faults.fault_effects import inflict
from megatron_moevement.runtime.faults.fault_points import FaultPoints
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.training.program import main

PREFIX = "--torn-when="


class MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def noting_allocations(folder):
    """Returns what tells bytes that malloc has given out, and small objects of Python."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallocInfo

    def note():
        demand = folder / f"{os.getpid()}.note"
        if demand.exists():
            gc.collect()
            found = mallinfo()
            allocated = f"{found.uordblks + found.hblkhd} {sys.getallocatedblocks()}"
            demand.with_suffix(".allocated").write_text(allocated)
            demand.unlink()

    return note


def tear_commits(folder):
    strike, note = FaultPoints.strike, noting_allocations(folder)

    def strike_on_demand(self, step, place):
        strike(self, step, place)
        if place is FaultPoint.COMMIT:
            note()
            demand = folder / str(self._rank)
            if demand.exists():
                demand.unlink()
                inflict(FaultKind.EXCEPTION)

    FaultPoints.strike = strike_on_demand


if __name__ == "__main__":
    (given,) = [argument for argument in sys.argv if argument.startswith(PREFIX)]
    tear_commits(Path(given.removeprefix(PREFIX)))
    sys.exit(main([argument for argument in sys.argv[1:] if argument != given]))
