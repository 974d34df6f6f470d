# SPDX-License-Identifier: Apache-2.0
"""The training program whose tiers fail a restart: when they are looked for, or while one is read.

The place is in the environment; a launch reads them.
"""

import errno
import os
import sys

from megatron_moevement.strategies.moevement.tiers import resume
from megatron_moevement.training.program import main

PLACE = "FAILING_TIER_PLACE"


def fail_in_a_restart():
    whole_tiers, load_slots, times = resume.whole_tiers, resume.load_slots, []

    def read(target):
        times.append(None)
        if len(times) > 1 and os.environ[PLACE] == "listing":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole_tiers(target)

    def load(target, tier, part, *rest):
        if part.owner.pp == 0 and os.environ[PLACE] == "loading":
            raise RuntimeError("the target hung up")
        return load_slots(target, tier, part, *rest)

    resume.whole_tiers, resume.load_slots = read, load


if __name__ == "__main__":
    fail_in_a_restart()
    sys.exit(main(sys.argv[1:]))
