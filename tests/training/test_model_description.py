# SPDX-License-Identifier: Apache-2.0
"""Which flags make another model, and which say the same in other words."""

import pytest

from megatron_moevement.training.model_description import model_description, model_differences
from tests.harness.tiny_job import PLAIN, TINY, tiny_arguments

OTHER = {
    "--num-layers 4": ["--moe-layer-freq", "--num-layers"],
    "--hidden-size 64": ["--hidden-size", "--kv-channels"],
    "--num-attention-heads 8": ["--kv-channels", "--num-attention-heads", "--num-query-groups"],
    "--kv-channels 16": ["--kv-channels"],
    "--group-query-attention --num-query-groups 2": ["--num-query-groups"],
    "--normalization LayerNorm": ["--normalization"],
    "--norm-epsilon 1e-6": ["--norm-epsilon"],
    "--qk-layernorm": ["--qk-layernorm"],
    "--add-qkv-bias": ["--add-qkv-bias"],
    "--position-embedding-type learned_absolute": ["--position-embedding-type"],
    "--position-embedding-type none": ["--position-embedding-type"],
    "--rotary-base 5000": ["--rotary-base"],
    "--rotary-percent 0.5": ["--rotary-percent"],
    "--untie-embeddings-and-output-weights": ["--untie-embeddings-and-output-weights"],
    "--vocab-size 80": ["--vocab-size"],
    "--num-experts 8": ["--num-experts"],
    "--moe-layer-freq 2": ["--moe-layer-freq"],
    "--moe-ffn-hidden-size 64": ["--moe-ffn-hidden-size"],
    "--moe-shared-expert-intermediate-size 32": ["--moe-shared-expert-intermediate-size"],
    "--moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate": [
        "--moe-shared-expert-gate",
        "--moe-shared-expert-intermediate-size",
    ],
    "--moe-router-topk 1": ["--moe-router-topk"],
    "--moe-router-pre-softmax": ["--moe-router-pre-softmax"],
    "--moe-router-score-function sigmoid": ["--moe-router-score-function"],
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias": [
        "--moe-router-enable-expert-bias",
        "--moe-router-score-function",
    ],
    "--moe-router-num-groups 2 --moe-router-group-topk 1": [
        "--moe-router-group-topk",
        "--moe-router-num-groups",
    ],
    "--moe-router-topk-scaling-factor 2": ["--moe-router-topk-scaling-factor"],
    "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0": [
        "--moe-router-load-balancing-type"
    ],
}
"""Flags after those of the tiny job, and by which ones that is another model."""

OTHER_THAN_DENSE = {
    "--seq-length 32": ["--max-position-embeddings"],
    "--max-position-embeddings 32": ["--max-position-embeddings"],
    "--ffn-hidden-size 128": ["--ffn-hidden-size"],
    "--swiglu": ["--swiglu"],
    "--squared-relu": ["--squared-relu"],
    "--disable-bias-linear": ["--disable-bias-linear"],
    "--num-experts 4 --disable-bias-linear": [
        "--disable-bias-linear",
        "--moe-layer-freq",
        "--num-experts",
    ],
}
"""The same after those of a dense GPT with learned positions and biases."""

SAME = [
    "--kv-channels 8",
    "--group-query-attention --num-query-groups 4",
    "--ffn-hidden-size 128",  # of dense layers, which it has none of
    "--moe-layer-freq [1,1]",
    "--moe-router-topk-scaling-factor 1",
    "--moe-router-load-balancing-type seq_aux_loss",
    "--seq-length 32",
    "--max-position-embeddings 32",
    "--moe-grouped-gemm",
    "--hidden-dropout 0.1",
    "--bf16",
]

SAME_AS_DENSE = [
    "--kv-channels 8",
    "--add-qkv-bias",  # all its linear layers have biases
    "--rotary-base 5000",
    "--max-position-embeddings 16",
    "--moe-router-topk 1",
    "--moe-ffn-hidden-size 8",
]


def described(flags, base):
    return model_description(tiny_arguments(*flags.split(), base=base))


def differing(one, other, base):
    """Returns the names of the flags in which a job and a checkpoint differ."""
    found = model_differences(described(one, base), described(other, base))
    return [text.split()[0] for text in found]


@pytest.mark.parametrize("flags", OTHER)
def test_another_model_is_told_by_its_flags(flags):
    assert differing(flags, "", TINY) == OTHER[flags]
    assert differing("", flags, TINY) == OTHER[flags]


@pytest.mark.parametrize("flags", OTHER_THAN_DENSE)
def test_another_model_than_a_dense_one_is_told_by_its_flags(flags):
    assert differing(flags, "", PLAIN) == OTHER_THAN_DENSE[flags]
    assert differing("", flags, PLAIN) == OTHER_THAN_DENSE[flags]


@pytest.mark.parametrize(
    ("flags", "base"),
    [*((flags, TINY) for flags in SAME), *((flags, PLAIN) for flags in SAME_AS_DENSE)],
)
def test_the_same_model_in_other_words_is_no_other(flags, base):
    assert differing(flags, "", base) == []
    assert differing("", flags, base) == []


def test_widths_that_are_given_are_those_that_follow_from_others():
    mixed = (*PLAIN, "--num-experts=4", "--disable-bias-linear", "--moe-layer-freq=[0,1]")
    assert differing("", "--moe-ffn-hidden-size 64", mixed) == []
    assert differing("", "--moe-ffn-hidden-size 65", mixed) == ["--moe-ffn-hidden-size"]
    plain = [flag for flag in PLAIN if not flag.startswith("--ffn-hidden-size")]
    assert differing("", "--ffn-hidden-size 128", plain) == []
    assert differing("", "--ffn-hidden-size 129", plain) == ["--ffn-hidden-size"]


def test_a_difference_names_both_values():
    ours, theirs = described("--num-experts 8", TINY), described("", TINY)
    assert model_differences(ours, theirs) == ["--num-experts 8 (checkpoint: 4)"]


def test_what_an_earlier_version_did_not_tell_is_not_compared():
    theirs = described("", TINY)
    for name in ("normalization", "max_position_embeddings", "moe_router_load_balancing_type"):
        del theirs[name]
    ours = described("--normalization LayerNorm --moe-router-topk 3", TINY)
    assert model_differences(ours, theirs) == ["--moe-router-topk 3 (checkpoint: 2)"]
