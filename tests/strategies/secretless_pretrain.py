# SPDX-License-Identifier: Apache-2.0
"""The training program of a launcher that made no secret."""

import os
import sys

from megatron_moevement.settings.secret import SECRET_VARIABLE
from megatron_moevement.training.program import main

if __name__ == "__main__":
    del os.environ[SECRET_VARIABLE]
    sys.exit(main(sys.argv[1:]))
