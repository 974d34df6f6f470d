# SPDX-License-Identifier: Apache-2.0
"""The training program, with so many processes in each failure domain: `--domain-size=N`."""

import os
import sys

from megatron_moevement.training.program import main

PREFIX = "--domain-size="

if __name__ == "__main__":
    (given,) = [argument for argument in sys.argv if argument.startswith(PREFIX)]
    domain = int(os.environ["RANK"]) // int(given.removeprefix(PREFIX))
    os.environ["MOEVEMENT_FAILURE_DOMAIN"] = f"domain{domain}"
    sys.exit(main([argument for argument in sys.argv[1:] if argument != given]))
