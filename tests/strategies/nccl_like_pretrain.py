"""The training program over a process group that behaves as NCCL's does.

NCCL_LIKE_MISHAP names what else happens: `slow-build` makes a process that is built in a restart
take `SLOW_S`, `late-abort` makes rank 2 abort its collectives `LATE_S` after the others.
"""

import functools
import os
import sys
import time

from tests.harness.nccl_like.install import install

SLOW_S = 12.0
LATE_S = 1.5


def slow_build():
    from megatron_moevement.training import resident  # noqa: PLC0415  (upstream follows)

    build = resident.build_part

    @functools.wraps(build)
    def slowly(*args, known=None, **kwargs):
        until_s = time.monotonic() + (SLOW_S if known is not None else 0.0)
        while time.monotonic() < until_s:  # alive, and at work
            time.sleep(0.01)
        return build(*args, known=known, **kwargs)

    resident.build_part = slowly


def late_abort():
    from megatron_moevement.integrations.nvrx.control_store import (  # noqa: PLC0415
        GenerationStore,
    )

    wait = GenerationStore.wait_for_interrupted

    @functools.wraps(wait)
    def late(self, timeout):
        wait(self, timeout)
        time.sleep(LATE_S)

    if os.environ["RANK"] == "2":
        GenerationStore.wait_for_interrupted = late


MISHAPS = {"slow-build": slow_build, "late-abort": late_abort}

if __name__ == "__main__":
    install()
    os.environ["MOEVEMENT_FAILURE_DOMAIN"] = f"domain{os.environ['RANK']}"
    for name in filter(None, os.environ.get("NCCL_LIKE_MISHAP", "").split(",")):
        MISHAPS[name]()
    from megatron_moevement.training.program import main

    sys.exit(main(sys.argv[1:]))
