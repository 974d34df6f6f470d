"""The training program with stages that wait instead of computing: `--stage-s=SECONDS`, first."""

import sys

from megatron_moevement.backends.backend import choose, load
from megatron_moevement.training.program import main

if __name__ == "__main__":
    load(choose(None)).install()  # before Megatron is imported
    from timed_stages import wait_in_stages

    wait_in_stages(float(sys.argv[1].removeprefix("--stage-s=")))
    sys.exit(main(sys.argv[2:]))
