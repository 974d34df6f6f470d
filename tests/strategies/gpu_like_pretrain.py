# SPDX-License-Identifier: Apache-2.0
"""The training program as a job on GPUs leaves its tiers: their identity and random streams."""

import sys
import types

import torch

from megatron_moevement.backends.backend import BackendName
from megatron_moevement.integrations.megatron.random_state import TRACKER, random_state
from megatron_moevement.policy.job.guarantee import Computation, DeviceKind, Kernels
from megatron_moevement.strategies import scalars
from megatron_moevement.training import protection, run_identity
from megatron_moevement.training.program import main

STREAM_BYTES = 16
"""Of a CUDA generator: seed and offset."""


def streams_of_gpu():
    state = random_state()
    state["device"] = torch.arange(STREAM_BYTES, dtype=torch.uint8)
    state[TRACKER] = dict.fromkeys(state[TRACKER], state["device"])
    return state


def pretend():
    run_identity.choose = lambda requested: BackendName.CUDA
    run_identity.torch = types.SimpleNamespace(__version__="2.13.0+cu130")
    scalars.random_state = streams_of_gpu
    protection._computation = lambda job: Computation(
        DeviceKind.CUDA, Kernels.ANY, 1, {"GPU": "G1"}, {}
    )


if __name__ == "__main__":
    pretend()
    sys.exit(main(sys.argv[1:]))
