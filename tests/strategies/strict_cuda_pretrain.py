# SPDX-License-Identifier: Apache-2.0
"""The training program on the strict CUDA runtime.

`STRICT_CUDA` names a folder in which contexts open files, and processes note what they allocate.
"""

import os
import sys
import threading
import time
from pathlib import Path

from tests.harness.strict_cuda.install import install
from tests.harness.strict_cuda.runtime import StrictRuntime

DEVICES = 8


def note_allocations(folder):
    fallocate = os.posix_fallocate

    def noted(descriptor, offset, size_bytes):
        with (folder / f"allocated-{os.getpid()}").open("a") as notes:
            notes.write(f"{time.time()}\t{threading.current_thread().name}\t{size_bytes}\n")
        fallocate(descriptor, offset, size_bytes)

    os.posix_fallocate = noted


if __name__ == "__main__":
    markers = Path(os.environ["STRICT_CUDA"])
    install(StrictRuntime(DEVICES, markers))
    note_allocations(markers)
    from megatron_moevement.training.program import main

    sys.exit(main(sys.argv[1:]))
