# SPDX-License-Identifier: Apache-2.0
"""The training program on one machine for each process: `--machines=FOLDER,FOLDER...`."""

import sys

from megatron_moevement.settings.launch import Launch
from megatron_moevement.training.program import main

PREFIX = "--machines="

if __name__ == "__main__":
    (given,) = [argument for argument in sys.argv if argument.startswith(PREFIX)]
    folders = given.removeprefix(PREFIX).split(",")
    own = f"--moevement-store-dir={folders[Launch.from_environment().process]}"
    sys.exit(main([*(argument for argument in sys.argv[1:] if argument != given), own]))
