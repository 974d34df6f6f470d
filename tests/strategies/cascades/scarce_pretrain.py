# SPDX-License-Identifier: Apache-2.0
"""The training program of which memory becomes scarce for a process, named by its first arguments.

Each happens in the first generation after a restart. `--fill=PROCESS:BYTES` leaves so much room in
the file system of the stores, before the process opens its own. `--starve=PROCESS:GENERATIONS`
denies it all further memory for so many generations, once it has its plan. `--squeeze=PROCESS`
moves it into a control group without memory, where the kernel kills it. `--machine=PROCESS:FOLDER`
gives a process a store directory of its own.
"""

import os
import resource
import sys
from pathlib import Path

from megatron_moevement.runtime.faults.fault_points import FaultPoints
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.settings.launch import Launch
from megatron_moevement.training.program import main

GROUPS = Path("/sys/fs/cgroup/memory")
ROOM_BYTES = 1 << 20


def at(place, first, effect):
    """Has an effect where a process comes to a place, from a generation on; it gets the number."""
    strike = FaultPoints.strike_outside

    def strike_and_more(self, where):
        if where is place and self._generation >= first:
            effect(self._generation)
        strike(self, where)

    FaultPoints.strike_outside = strike_and_more


def fill(left_bytes):
    def take_room(generation):
        given = [one for one in sys.argv if one.startswith("--moevement-store-dir=")]
        store = given[-1].partition("=")[2]
        file = Path(store) / "of-somebody-else"
        if not file.exists():
            free = os.statvfs(store).f_bavail * os.statvfs(store).f_bsize
            with file.open("wb") as one:
                os.posix_fallocate(one.fileno(), 0, free - left_bytes)

    at(FaultPoint.START, 1, take_room)


def starve(generations):
    def deny(generation):
        unlimited = resource.RLIM_INFINITY
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = used + ROOM_BYTES if generation <= generations else unlimited
        resource.setrlimit(resource.RLIMIT_AS, (limit, unlimited))

    at(FaultPoint.PLAN, 1, deny)
    at(FaultPoint.CONNECT, 2, deny)


def squeeze():
    def enter(generation):
        if generation > 1:
            return
        group = GROUPS / f"moevement-test-{os.getpid()}"
        group.mkdir()
        for limit in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
            (group / limit).write_text(str(ROOM_BYTES))
        (group / "cgroup.procs").write_text(str(os.getpid()))

    at(FaultPoint.START, 1, enter)


TROUBLES = {"--fill": fill, "--starve": starve, "--squeeze": squeeze}


if __name__ == "__main__":
    kept = sys.argv[1:]
    me = Launch.from_environment().process
    for argument in sys.argv[1:]:
        name, _, numbers = argument.partition("=")
        if name == "--machine":
            kept.remove(argument)
            process, _, folder = numbers.partition(":")
            if int(process) == me:
                kept.append(f"--moevement-store-dir={folder}")
        if name in TROUBLES:
            kept.remove(argument)
            process, *rest = map(int, numbers.split(":"))
            if process == me:
                TROUBLES[name](*rest)
    sys.argv[1:] = kept
    sys.exit(main(kept))
