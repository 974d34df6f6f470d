# SPDX-License-Identifier: Apache-2.0
"""The training program on ranks of which each has a disk of its own under the same path."""

import os
import sys

from megatron_moevement.strategies.moevement.tiers import tiers
from megatron_moevement.training.program import main

if __name__ == "__main__":
    open_target = tiers.open_target
    tiers.open_target = lambda place, run_id: open_target(f"{place}-{os.environ['RANK']}", run_id)
    sys.exit(main(sys.argv[1:]))
