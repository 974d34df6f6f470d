"""The training program on the strict CUDA runtime.

`STRICT_CUDA` names a folder in which contexts open files.
"""

import os
import sys
from pathlib import Path

from tests.harness.strict_cuda.install import install
from tests.harness.strict_cuda.runtime import StrictRuntime

DEVICES = 8

if __name__ == "__main__":
    install(StrictRuntime(DEVICES, Path(os.environ["STRICT_CUDA"])))
    from megatron_moevement.training.program import main

    sys.exit(main(sys.argv[1:]))
