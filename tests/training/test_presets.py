# SPDX-License-Identifier: Apache-2.0
"""The presets have the numbers of parameters that the paper's table of models gives."""

import dataclasses

import pytest

from megatron_moevement.backends.backend import BackendName
from megatron_moevement.policy.job.operators import OperatorKind
from megatron_moevement.settings.parallelism import Parallelism
from megatron_moevement.settings.precision import Precision
from megatron_moevement.training.presets import PARAMETERS, PRESETS, preset_model

PAPER = {
    "moe-llava": (2.9e9, 2.0e9),
    "gpt-moe": (7.3e9, 1.6e9),
    "qwen-moe": (14.3e9, 2.7e9),
    "deepseek-moe": (16.4e9, 3.7e9),
}
"""Total and active parameters."""

VOCABULARY_OF_BYTES = 320
"""With its end of document, padded as the preset `tiny` asks for."""

STRUCTURE = {
    "moe-llava": (32, 4, 2),
    "gpt-moe": (12, 32, 6),
    "qwen-moe": (24, 64, 8),
    "deepseek-moe": (28, 64, 8),
}
"""Layers, routed experts, experts per token."""


def count(preset):
    """Returns total and active parameters of the model that Megatron builds, and allocates none."""
    import torch  # noqa: PLC0415  (in a process with Megatron)

    from megatron_moevement.integrations.megatron.inventory import (  # noqa: PLC0415
        operator_of_parameters,
    )
    from megatron_moevement.integrations.megatron.model import build_chunk  # noqa: PLC0415
    from megatron_moevement.integrations.megatron.random_state import (  # noqa: PLC0415
        seed_everything,
    )
    from megatron_moevement.integrations.megatron.transformer_config import (  # noqa: PLC0415
        transformer_config,
    )
    from megatron_moevement.integrations.megatron.transformer_options import (  # noqa: PLC0415
        TransformerOptions,
    )
    from megatron_moevement.integrations.megatron.weightless import (  # noqa: PLC0415
        weightless_rank,
    )

    flags, (architecture, moe) = PRESETS[preset], preset_model(preset)
    alone, backend = Parallelism(), BackendName.CPU
    settings = (architecture, moe, TransformerOptions(), alone, Precision())
    config = transformer_config(*settings, backend=backend, deterministic=False)
    with weightless_rank(0, 1, alone, architecture.num_layers, backend):
        seed_everything(1, 0)
        vocab_size = flags.get("vocab_size", VOCABULARY_OF_BYTES)
        chunk = build_chunk(
            config, architecture, vocab_size=vocab_size, seq_length=flags["seq_length"]
        )
    routed = total = 0
    for _, tensor, operator in operator_of_parameters(chunk):
        if isinstance(tensor, torch.nn.Parameter):
            total += tensor.numel()
            routed += tensor.numel() * (operator.kind is OperatorKind.EXPERT)
    return total, total - routed + routed * moe.moe_router_topk // moe.num_experts


@pytest.mark.distributed
@pytest.mark.parametrize("preset", PRESETS)
def test_the_known_numbers_of_parameters_are_those_of_megatrons_models(
    preset, megatron_fork_server
):
    result = megatron_fork_server.run(count, world_size=1, args=[preset]).check()
    assert tuple(result.values[0]) == dataclasses.astuple(PARAMETERS[preset])


def test_the_parameters_of_each_preset_are_known():
    assert PARAMETERS.keys() == PRESETS.keys()


@pytest.mark.parametrize("preset", PAPER)
def test_total_and_active_parameters_are_within_3_percent_of_the_paper(preset):
    assert dataclasses.astuple(PARAMETERS[preset]) == pytest.approx(PAPER[preset], rel=0.03)


@pytest.mark.parametrize("preset", STRUCTURE)
def test_layers_and_experts_are_those_of_the_paper(preset):
    architecture, moe = preset_model(preset)
    found = (architecture.num_layers, moe.num_experts, moe.moe_router_topk)
    assert found == STRUCTURE[preset]
