"""The presets have the numbers of parameters that the paper's table of models gives."""

import pytest

from megatron_moevement.training.presets import PRESETS, preset_model

pytestmark = pytest.mark.distributed

PAPER = {
    "moe-llava": (2.9e9, 2.0e9),
    "gpt-moe": (7.3e9, 1.6e9),
    "qwen-moe": (14.3e9, 2.7e9),
    "deepseek-moe": (16.4e9, 3.7e9),
}
"""Total and active parameters."""

STRUCTURE = {
    "moe-llava": (32, 4, 2),
    "gpt-moe": (12, 32, 6),
    "qwen-moe": (24, 64, 8),
    "deepseek-moe": (28, 64, 8),
}
"""Layers, routed experts, experts per token."""


def count(preset):
    """Returns total and active parameters; runs in a process with Megatron."""
    from megatron_moevement.integrations.megatron.parameter_count import (  # noqa: PLC0415
        count_parameters,
    )

    flags = PRESETS[preset]
    counted = count_parameters(
        *preset_model(preset), vocab_size=flags["vocab_size"], seq_length=flags["seq_length"]
    )
    return counted.total, counted.active


@pytest.mark.parametrize("preset", PAPER)
def test_total_and_active_parameters_are_within_3_percent_of_the_paper(
    preset, megatron_fork_server
):
    result = megatron_fork_server.run(count, world_size=1, args=[preset]).check()
    assert result.values[0] == pytest.approx(PAPER[preset], rel=0.03)


@pytest.mark.parametrize("preset", STRUCTURE)
def test_layers_and_experts_are_those_of_the_paper(preset):
    architecture, moe = preset_model(preset)
    found = (architecture.num_layers, moe.num_experts, moe.moe_router_topk)
    assert found == STRUCTURE[preset]
