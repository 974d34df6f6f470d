# SPDX-License-Identifier: Apache-2.0
"""`--yaml-cfg`: a file says what flags say."""

import dataclasses

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.training.arguments import parse
from megatron_moevement.training.data.arguments import DataConfig
from tests.harness.tiny_job import TINY

FILE = """
language_model:
  num_layers: 4
  hidden_size: 64
  num_attention_heads: 4
  num_query_groups: null
  kv_channels: null
  layernorm_epsilon: 1.e-6
  add_bias_linear: False
  add_qkv_bias: False
  activation_func: swiglu
  num_moe_experts: 4
  moe_layer_freq: [0, 1, 1, 1]
  moe_router_load_balancing_type: [aux_loss, seq_aux_loss]
  moe_aux_loss_coeff: [0.01, 0.02]
  rotary_interleaved: True
  bias_dropout_fusion: False
  apply_rope_fusion: True
  clone_scatter_output_in_embedding: True
  fp8: null
  fp8_margin: 0
  tp_comm_split_ag: True
model_parallel:
  tensor_model_parallel_size: 1
  context_parallel_size: 1
  perform_initialization: True
  bf16: True
  params_dtype: null
  overlap_p2p_comm: False
  batch_p2p_comm: True
# training:
use_legacy_models: False
micro_batch_size: 2
global_batch_size: 12
check_for_nan_in_loss_and_grad: True
bert_binary_head: True
scatter_gather_tensors_in_pipeline: True
align_param_gather: False
manual_gc: True
manual_gc_eval: True
train_iters: 8
lr: 2.5e-4
adam_eps: 1.e-08
position_embedding_type: rope
untie_embeddings_and_output_weights: True
mock_data: ${MOCKED}
tokenizer_type: NullTokenizer
vocab_size: 96
vocab_extra_ids: 0
seq_length: 16
log_loss_scale_to_tensorboard: False
mmap_bin_files: True
use_flash_attn: False
"""
FLAGS = """
--num-layers 4 --hidden-size 64 --num-attention-heads 4 --norm-epsilon 1e-6 --disable-bias-linear
--swiglu --num-experts 4 --moe-layer-freq [0,1,1,1]
--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.01 0.02
--rotary-interleaved --no-bias-dropout-fusion --bf16 --no-overlap-p2p-communication
--micro-batch-size 2 --global-batch-size 12 --manual-gc --train-iters 8 --lr 2.5e-4
--position-embedding-type rope --untie-embeddings-and-output-weights --mock-data
--tokenizer-type NullTokenizer --vocab-size 96 --seq-length 16 --no-log-loss-scale-to-tensorboard
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("MOCKED", "true")
    path = tmp_path / "job.yaml"
    path.write_text(FILE)
    return path


def topics(arguments):
    """Returns what a command line came to."""
    values = vars(arguments) | {"data": arguments.data.flags}
    assert isinstance(arguments.data, DataConfig)
    return values


def test_a_file_says_what_flags_say(file):
    assert topics(parse(["--yaml-cfg", str(file)], 1)) == topics(parse(FLAGS.split(), 1))


def test_a_flag_wins_over_the_file(file):
    arguments = parse(["--lr", "1e-3", f"--yaml-cfg={file}"], 1)
    expected = parse(FLAGS.split(), 1)
    lr = dataclasses.replace(expected.optimization, lr=1e-3)
    assert topics(arguments) == topics(expected) | {"optimization": lr}


def test_what_is_not_covered_is_refused_as_on_the_command_line(file):
    changes = {"fp8: null": "fp8: hybrid", "fp8_margin: 0": "fp8_margin: 1"}
    for before, after in changes.items():
        file.write_text(file.read_text().replace(before, after))
    with file.open("a") as more:
        more.write("rampup_batch_size: [2, 2, 8]\nsome_thing: 1\n")
    with pytest.raises(UserError) as refused:
        parse(["--yaml-cfg", str(file)], 1)
    for part in (
        "FP8 and FP4 (--fp8-format hybrid, --fp8-margin 1)",
        "growing batch size (--rampup-batch-size 2 2 8)",
        "unknown flags (--some-thing)",
    ):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [", "job.yaml: while parsing"),
        ("- a", "job.yaml: give a mapping of settings"),
        ("lr: ${NO_SUCH_VARIABLE}", "job.yaml: there is no variable NO_SUCH_VARIABLE"),
        ("activation_func: tanh", "job.yaml: activation_func is none of gelu, swiglu"),
        (None, "job.yaml: [Errno 2] No such file"),
    ],
)
def test_a_file_that_says_nothing_is_refused(file, text, told):
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(UserError) as refused:
        parse([*TINY, "--yaml-cfg", str(file)], 1)
    assert told in str(refused.value)
