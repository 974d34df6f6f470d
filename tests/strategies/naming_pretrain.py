# SPDX-License-Identifier: Apache-2.0
"""The training program that dies once a checkpoint has its name: `--dies-naming=STEP`."""

import os
import signal
import sys

from megatron_moevement.training import checkpoints
from megatron_moevement.training.program import main

PREFIX = "--dies-naming="


def die_once_there(name):
    """Ends the process as soon as the folder of a checkpoint has its name."""
    sync = checkpoints.sync

    def sync_or_die(folder):
        if (folder / name).is_dir():
            os.kill(os.getpid(), signal.SIGKILL)
        sync(folder)

    checkpoints.sync = sync_or_die


if __name__ == "__main__":
    (given,) = [argument for argument in sys.argv if argument.startswith(PREFIX)]
    die_once_there(f"iter_{int(given.removeprefix(PREFIX)):07d}")
    sys.exit(main([argument for argument in sys.argv[1:] if argument != given]))
