# SPDX-License-Identifier: Apache-2.0
"""The training program with a rank that computes slowly: `--slow=RANK`, 1.5 s a step more.

With `--slow-copies` the copies of each slot into host memory take a second on every rank.
"""

import os
import sys
import time

from megatron_moevement.backends.cpu import HostCopyStream
from megatron_moevement.integrations.megatron.optimizer import SplitOptimizer
from megatron_moevement.training.program import main

SLOWNESS_S = 1.5
COPIES_S = 1.0


def compute_slowly():
    prepare = SplitOptimizer.prepare

    def prepare_slowly(self, statistics=None):
        time.sleep(SLOWNESS_S)
        return prepare(self, statistics)

    SplitOptimizer.prepare = prepare_slowly


def copy_slowly():
    HostCopyStream.join = lambda self: time.sleep(COPIES_S)


if __name__ == "__main__":
    if f"--slow={os.environ['RANK']}" in sys.argv:
        compute_slowly()
    if "--slow-copies" in sys.argv:
        copy_slowly()
    sys.exit(main([argument for argument in sys.argv[1:] if not argument.startswith("--slow")]))
