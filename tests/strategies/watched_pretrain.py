# SPDX-License-Identifier: Apache-2.0
"""The training program; notes which module it imports when: `--imports=FOLDER`."""

import os
import sys
import time
from pathlib import Path

from megatron_moevement.training.program import main

PREFIX = "--imports="


def watch_imports(folder):
    """Writes down what is imported and was not before."""

    # A finder would not be asked: the backend puts its own in front.
    def note(event, arguments):
        if event == "import":
            with (folder / str(os.getpid())).open("a") as log:
                log.write(f"{time.time()} {arguments[0]}\n")

    sys.addaudithook(note)


if __name__ == "__main__":
    (given,) = [argument for argument in sys.argv if argument.startswith(PREFIX)]
    watch_imports(Path(given.removeprefix(PREFIX)))
    sys.exit(main([argument for argument in sys.argv[1:] if argument != given]))
