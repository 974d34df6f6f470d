# SPDX-License-Identifier: Apache-2.0
"""The training program with other kernels for products of matrices, as another machine has them."""

import sys

import torch

from megatron_moevement.training.program import main

if __name__ == "__main__":
    torch.backends.mkldnn.set_flags(_enabled=False)
    sys.exit(main(sys.argv[1:]))
