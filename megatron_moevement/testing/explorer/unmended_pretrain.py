"""The training program without one of its mends, named by an argument: `--without=MEND`."""

import sys

from megatron_moevement.testing.explorer.mend import Mend
from megatron_moevement.testing.explorer.mends import WITHOUT
from megatron_moevement.training.program import main

PREFIX = "--without="

if __name__ == "__main__":
    (given,) = [argument for argument in sys.argv if argument.startswith(PREFIX)]
    WITHOUT[Mend(given.removeprefix(PREFIX))]()
    sys.exit(main([argument for argument in sys.argv[1:] if argument != given]))
