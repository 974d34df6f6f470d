# SPDX-License-Identifier: Apache-2.0
"""The training program with ranks that share GPUs: collectives go by the host, as gloo's."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # where tests.harness is

from megatron_moevement.backends.backend import choose
from tests.harness.nccl_like.install import install

if __name__ == "__main__":
    install(choose(None))
    from megatron_moevement.training.program import main

    sys.exit(main(sys.argv[1:]))
