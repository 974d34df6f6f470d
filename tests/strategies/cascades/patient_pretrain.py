# SPDX-License-Identifier: Apache-2.0
"""The training program that waits for as long as it takes for what its launcher says of an end."""

import sys

from megatron_moevement.runtime.coordination import roll_call
from megatron_moevement.training.program import main

if __name__ == "__main__":
    roll_call._END_PATIENCE_S = 200.0
    sys.exit(main(sys.argv[1:]))
