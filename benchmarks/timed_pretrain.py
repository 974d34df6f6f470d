# SPDX-License-Identifier: Apache-2.0
"""The training program with stages that wait instead of computing: `--stage-s=SECONDS`, first.

After it `--idle-layers`: the layers compute nothing, and the waits take all of their time.
"""

import sys

from megatron_moevement.backends.backend import choose, load
from megatron_moevement.training.program import main

if __name__ == "__main__":
    load(choose(None)).install()  # before Megatron is imported
    from timed_stages import leave_layers_out, wait_in_stages

    _, stage_s, *flags = sys.argv
    wait_in_stages(float(stage_s.removeprefix("--stage-s=")))
    if flags[:1] == ["--idle-layers"]:
        del flags[0]
        leave_layers_out()
    sys.exit(main(flags))
