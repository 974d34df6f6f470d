# SPDX-License-Identifier: Apache-2.0
"""The training program that writes its tiers slowly: a slot takes about as long as a step."""

import sys
import time

from megatron_moevement.runtime.tiers.writer import TierWriter
from megatron_moevement.training.program import main

PIECE_S = 0.004


def write_slowly():
    proceed = TierWriter._proceed

    def proceed_slowly(self):
        time.sleep(PIECE_S)
        proceed(self)

    TierWriter._proceed = proceed_slowly


if __name__ == "__main__":
    write_slowly()
    sys.exit(main(sys.argv[1:]))
