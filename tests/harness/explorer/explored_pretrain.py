# SPDX-License-Identifier: Apache-2.0
"""The training program as the explorer starts it where that takes more than flags.

`--without=MEND` takes a mend out; `--domain-size=N` puts N processes into each failure domain;
`--bandwidths=SEED` draws what ranks measure.
"""

import argparse
import os
import sys

from megatron_moevement.training.program import main
from tests.harness.drawn_bandwidths import drawn, measure
from tests.harness.explorer.mend import Mend
from tests.harness.explorer.mends import WITHOUT

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--without", type=Mend)
    parser.add_argument("--domain-size", type=int, default=1)
    parser.add_argument("--bandwidths", type=int, default=0)
    own, others = parser.parse_known_args()
    if own.without is not None:
        WITHOUT[own.without]()
    if own.bandwidths:
        measure(drawn(own.bandwidths))
    os.environ["MOEVEMENT_FAILURE_DOMAIN"] = f"domain{int(os.environ['RANK']) // own.domain_size}"
    sys.exit(main(others))
