# SPDX-License-Identifier: Apache-2.0
"""The training program with an Adam that counts steps per group of parameters."""

import sys

from megatron_moevement.training.program import main
from tests.harness.group_step_adam import install

if __name__ == "__main__":
    install()
    sys.exit(main(sys.argv[1:]))
