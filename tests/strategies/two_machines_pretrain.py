# SPDX-License-Identifier: Apache-2.0
"""The training program on ranks 1 and up of another machine: their network has another name."""

import os
import sys

from megatron_moevement.strategies.moevement import introduction
from megatron_moevement.training.program import main

if __name__ == "__main__":
    if os.environ["RANK"] != "0":
        introduction.own_network = lambda: "the boot of another kernel"
    sys.exit(main(sys.argv[1:]))
