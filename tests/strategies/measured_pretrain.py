# SPDX-License-Identifier: Apache-2.0
"""The training program with measurements that are known before: `--stalled=STEP --link=SHARE`.

From that step on every rank measures stalls, and a link on which an iteration sends this share of a
slot of the W that was planned; before it none, and bandwidths of a hundred such slots.
"""

import sys

from megatron_moevement.training.program import main
from tests.harness.drawn_bandwidths import ITERATION_S, Given, measure

FAST = 120.0

if __name__ == "__main__":
    _, stalled, link, *flags = sys.argv
    first_stalled = int(stalled.removeprefix("--stalled="))
    slow = Given(FAST, float(link.removeprefix("--link=")), ITERATION_S)
    measure(lambda step: slow if step >= first_stalled else Given(FAST, FAST, 0.0))
    sys.exit(main(flags))
