# SPDX-License-Identifier: Apache-2.0
"""The training program whose window schedule changes at steps that are known before."""

import sys

from megatron_moevement.training.program import main
from tests.harness import punctual_changes

if __name__ == "__main__":
    punctual_changes.install()
    sys.exit(main(sys.argv[1:]))
