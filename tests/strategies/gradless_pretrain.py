# SPDX-License-Identifier: Apache-2.0
"""The training program, where every fault comes inside of `torch.no_grad`, before its last line.

The interrupt is raised in the main thread at any instruction, so also between the lines that put
the thread's mode back; this program makes each one such an interrupt.
"""

import sys

import torch

from megatron_moevement.training.program import main
from megatron_moevement.training.run import GenerationRun


def leave_torn(run, leave=GenerationRun.leave):
    leave(run)
    torch.set_grad_enabled(False)


if __name__ == "__main__":
    GenerationRun.leave = leave_torn
    sys.exit(main(sys.argv[1:]))
