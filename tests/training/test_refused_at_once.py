# SPDX-License-Identifier: Apache-2.0
"""What flags contradict is refused at once, but for what another refusal would cause."""

import pytest

from megatron_moevement.cli import main as command
from megatron_moevement.errors import UserError
from megatron_moevement.training.arguments import parse
from megatron_moevement.training.program import main
from tests.harness.bad_input import TINY, refused_lines

RANKS = 2
TOGETHER = {
    "--hidden-size 33 --global-batch-size 5 --bf16 --fp16": (
        "--bf16 and --fp16 exclude each other",
        "--hidden-size 33 is no multiple of --num-attention-heads 4",
        "--global-batch-size 5 is no multiple",
    ),
    "--reset-attention-mask --data-path d --tokenizer-type HuggingFaceTokenizer": (
        "--reset-attention-mask: ",
        "--mock-data and --data-path exclude each other",
        "HuggingFaceTokenizer needs --tokenizer-model",
    ),
    "--log-interval 0 --timing-log-level 3 --wandb-project p --max-position-embeddings 8": (
        "--log-interval 0 must be at least 1",
        "--timing-log-level 3 must be 0, 1 or 2",
        "--wandb-project needs --wandb-exp-name",
        "--seq-length 16 exceeds --max-position-embeddings 8",
    ),
    "--save-interval 2 --finetune --calc-ft-timeouts --moevement-recover-only": (
        "the ranks are not monitored",
        "--calc-ft-timeouts keeps its limits in --save",
        "--save-interval needs --save",
        "--finetune needs --load",
        "--moevement-recover-only recovers what a strategy left",
        "--moevement-recover-only saves a checkpoint",
    ),
    "--squared-relu --recompute-granularity full --moe-aux-loss-coeff 0.1 0.2 "
    "--moe-router-num-groups 3 --moe-router-group-topk 1 --moe-shared-expert-gate": (
        "--swiglu and --squared-relu",
        "needs --recompute-method",
        "needs --recompute-num-layers",
        "--moe-aux-loss-coeff must have one value",
        "--moe-shared-expert-gate needs",
        "--moe-router-num-groups 3 must divide",
    ),
    "--min-lr 1 --lr-warmup-iters 8 --weight-decay-incr-style linear --manual-gc-interval 2 "
    "--moevement-faults kill:9:forward@5 --moevement-fault-seed 3": (
        "--manual-gc-interval needs --manual-gc",
        "--min-lr 1.0 exceeds --lr",
        "the warm-up takes 8 of 8",
        "--weight-decay-incr-style needs --start-weight-decay",
        "there is no rank 5",
        "--moevement-fault-seed needs",
    ),
    "--expert-model-parallel-size 2 --num-experts 5 --overlap-param-gather "
    "--pipeline-model-parallel-size 1 --decoder-first-pipeline-num-layers 9": (
        "--num-experts 5 is no multiple of --expert-model-parallel-size 2",
        "don't fit",
        "--overlap-param-gather needs",
    ),
}
"""Flags, after those of a job that would train, and what the lines must say, each in its own."""

UNREADABLE = {
    "--lr x --micro-batch-size y --split": (
        "argument --lr: 'x' is no number",
        "argument --micro-batch-size: ",
        "argument --split: expected one argument",
    ),
    "--fp8-format hybrid --context-parallel-size 2 --lr x --hidden_size 8": (
        "not supported: ",
        "argument --lr: ",
    ),
    "--moe-token-dispatcher-type flex --position-embedding-type none_such --num_layers=2": (
        "not supported: ",
        "argument --position-embedding-type: invalid choice",
    ),
    "--num_layers 2 --lr= --train-iters 2 3": (
        "unrecognized arguments: --num_layers 2 3; did you mean --num-layers?",
        "argument --lr: ",
    ),
    "--micro-batch-size 0 --global-batch-size 5 --seed -1": ("--micro-batch-size", "--seed"),
}
"""Flags and values that can't be read: contradictions come after them."""

CAUSES = {
    "--pipeline-model-parallel-size 3 --num-layers 3 --global-batch-size 5": "2 ranks can't be",
    "--tensor-model-parallel-size 4 --sequence-parallel --micro-batch-size 3": "2 ranks can't be",
    "--train-samples 8 --global-batch-size 8": "--train-samples and --train-iters exclude",
    "--inprocess-active-world-size 3 --global-batch-size 5": "the job has 2 processes",
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4 "
    "--micro-batch-size 4 --global-batch-size 6": "--global-batch-size 6 is no multiple",
}
"""Flags whose one refusal would mislead, or crash, other checks."""

MISSING = {
    "--num-layers": {"--num-layers", "--num-attention-heads"},
    "--train-iters": {"--train-iters"},
    "--lr": {"--lr"},
}


@pytest.mark.parametrize(("flags", "wanted"), [*TOGETHER.items(), *UNREADABLE.items()])
def test_what_is_wrong_is_refused_at_once(flags, wanted):
    with pytest.raises(UserError) as caught:
        parse([*TINY, *flags.split()], RANKS)
    messages = caught.value.messages
    assert len(messages) == len(wanted), messages
    for part in wanted:
        assert sum(part in message for message in messages) == 1, (part, messages)


@pytest.mark.parametrize("flags", CAUSES)
def test_a_refusal_is_not_followed_by_what_it_causes(flags):
    with pytest.raises(UserError, match=CAUSES[flags]) as caught:
        parse([*TINY, *flags.split()], RANKS)
    assert len(caught.value.messages) == 1, caught.value.messages
    assert str(caught.value) == caught.value.messages[0]


@pytest.mark.parametrize("name", MISSING)
def test_flags_that_are_missing_are_named_and_nothing_else(name):
    left = [flag for flag in TINY if not flag.startswith((f"{name}=", "--model-preset"))]
    if name != "--num-layers":
        left.append("--model-preset=tiny")
    with pytest.raises(UserError) as caught:
        parse([*left, "--seq-length=16"], RANKS)
    assert {message.split()[0] for message in caught.value.messages} == MISSING[name]


def test_each_refusal_has_a_line_of_the_log_and_of_the_command(monkeypatch, capsys):
    flags = ["--save-interval", "2", "--finetune"]
    wanted = ["--save-interval needs --save DIR", "--finetune needs --load DIR"]
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert main([*TINY, *flags]) == 2
    assert refused_lines(capsys.readouterr().err) == wanted
    assert command(["check", "-n", "2", "--", *TINY, *flags]) == 2
    assert capsys.readouterr().err.splitlines() == [f"moevement check: {line}" for line in wanted]
