# SPDX-License-Identifier: Apache-2.0
"""The width of an MLP without `--ffn-hidden-size`, as Megatron-LM's arguments make it."""

import pytest

from megatron_moevement.backends.backend import BackendName
from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.transformer_config import transformer_config
from megatron_moevement.training.arguments import parse
from megatron_moevement.training.model_description import model_description, with_defaults

FLAGS = (
    "--num-layers 2 --num-attention-heads 4 --seq-length 8 --mock-data --disable-bias-linear "
    "--tokenizer-type NullTokenizer --vocab-size 64 --micro-batch-size 1 --train-iters 2 --lr 1e-3"
)
WIDTHS = {
    "--hidden-size 768": 3072,
    "--hidden-size 768 --squared-relu": 3072,
    "--hidden-size 768 --swiglu": 2048,
    "--hidden-size 800 --swiglu": 2112,  # 2133.3 in steps of 64
    "--hidden-size 768 --swiglu --ffn-hidden-size 1000": 1000,
}


def parsed(flags):
    return parse([*FLAGS.split(), *flags.split()], 1)


@pytest.mark.parametrize("flags", WIDTHS)
@pytest.mark.parametrize("experts", ["", "--num-experts 4 --moe-layer-freq [0,1]"])
def test_the_width_is_that_of_megatron_lm(flags, experts):
    arguments = parsed(f"{flags} {experts}")
    config = transformer_config(
        arguments.architecture,
        arguments.moe,
        arguments.transformer,
        arguments.parallelism,
        arguments.precision,
        backend=BackendName.CPU,
        deterministic=False,
    )
    described = with_defaults(model_description(arguments))
    assert arguments.architecture.mlp_width == config.ffn_hidden_size == WIDTHS[flags]
    assert config.moe_ffn_hidden_size == (WIDTHS[flags] if experts else None)
    assert described["ffn_hidden_size"] == WIDTHS[flags]
    assert described["moe_ffn_hidden_size"] == WIDTHS[flags]


def test_a_width_of_nothing_is_refused_where_it_is_used():
    flags = "--hidden-size 16 --swiglu --num-experts 4 --moe-layer-freq"
    with pytest.raises(UserError, match="needs --ffn-hidden-size"):
        parsed(f"{flags} 1")
    with pytest.raises(UserError, match="needs --ffn-hidden-size"):
        parsed(f"{flags} [0,1] --moe-ffn-hidden-size 32")
    assert parsed(f"{flags} 1 --moe-ffn-hidden-size 32").moe.moe_ffn_hidden_size == 32


def test_a_module_that_is_none_is_refused():
    with pytest.raises(UserError, match="--recompute-modules: invalid choice: 'core_atn'"):
        parsed("--hidden-size 64 --recompute-granularity selective --recompute-modules core_atn")
