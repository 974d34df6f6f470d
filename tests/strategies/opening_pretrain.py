# SPDX-License-Identifier: Apache-2.0
"""The training program of which one process dies before it opens its store: `--dies-opening=N`."""

import os
import signal
import sys

from megatron_moevement.settings.launch import Launch
from megatron_moevement.strategies.moevement import opening
from megatron_moevement.training.program import main

PREFIX = "--dies-opening="


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    (given,) = [argument for argument in sys.argv if argument.startswith(PREFIX)]
    if Launch.from_environment().process == int(given.removeprefix(PREFIX)):
        opening._open_store = die
    sys.exit(main([argument for argument in sys.argv[1:] if argument != given]))
