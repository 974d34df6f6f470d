# SPDX-License-Identifier: Apache-2.0
"""The training program whose tiers can be read when it is launched, and never again."""

import errno
import os
import sys

from megatron_moevement.strategies.moevement.tiers import resume
from megatron_moevement.training.program import main


def read_once():
    whole_tiers, times = resume.whole_tiers, []

    def read(target):
        times.append(None)
        if len(times) > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole_tiers(target)

    resume.whole_tiers = read


if __name__ == "__main__":
    read_once()
    sys.exit(main(sys.argv[1:]))
