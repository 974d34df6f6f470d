# SPDX-License-Identifier: Apache-2.0
"""The training program with measurements that are known before: `--stalled=STEP`, first.

From that step on every rank measures stalls, and bandwidths at which slots of the W that was
planned fit; before it none, and a hundred times these bandwidths.
"""

import sys

from megatron_moevement.training.program import main
from tests.harness.drawn_bandwidths import ITERATION_S, Given, measure

if __name__ == "__main__":
    _, stalled, *flags = sys.argv
    first_stalled = int(stalled.removeprefix("--stalled="))
    measure(lambda step: Given(1.2, ITERATION_S) if step >= first_stalled else Given(120.0, 0.0))
    sys.exit(main(flags))
