"""The training program with a rank that computes slowly: `--slow=RANK`, 1.5 s a step more."""

import os
import sys
import time

from megatron_moevement.integrations.megatron.optimizer import SplitOptimizer
from megatron_moevement.training.program import main

SLOWNESS_S = 1.5


def compute_slowly():
    prepare = SplitOptimizer.prepare

    def prepare_slowly(self, statistics=None):
        time.sleep(SLOWNESS_S)
        return prepare(self, statistics)

    SplitOptimizer.prepare = prepare_slowly


if __name__ == "__main__":
    prefix = "--slow="
    if f"{prefix}{os.environ['RANK']}" in sys.argv:
        compute_slowly()
    sys.exit(main([argument for argument in sys.argv[1:] if not argument.startswith(prefix)]))
