# SPDX-License-Identifier: Apache-2.0
"""The training program with measurements that are known before.

`--stalled=STEP --link=SHARE`: from that step on every rank measures stalls, and a link on which an
iteration sends this share of a slot of the W that was planned. `--stalled=STEP --longer=TIMES`:
from that step on iterations are so many times as long instead. Before it none of that is measured,
and bandwidths of a hundred such slots.
"""

import sys

from megatron_moevement.training.program import main
from tests.harness.drawn_bandwidths import ITERATION_S, Given, measure

FAST = 120.0

if __name__ == "__main__":
    _, stalled, how, *flags = sys.argv
    first = int(stalled.removeprefix("--stalled="))
    name, _, number = how.partition("=")
    then = {
        "--link": Given(FAST, float(number), ITERATION_S),
        "--longer": Given(FAST, FAST, 0.0, float(number) * ITERATION_S),
    }[name]
    measure(lambda step: then if step >= first else Given(FAST, FAST, 0.0))
    sys.exit(main(flags))
