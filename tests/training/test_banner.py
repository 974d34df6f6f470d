# SPDX-License-Identifier: Apache-2.0
"""What a job tells of itself at its start: on one rank, once, and as it is."""

import pytest

from megatron_moevement.training.arguments import parse
from megatron_moevement.training.banner import told_flags, told_model
from megatron_moevement.training.presets import PARAMETERS
from tests.harness.bad_input import run_tiny
from tests.harness.log_lines import log_lines

NAMES = ("model", "layout", "memory", "run", "protected by", "begins")
TINY = PARAMETERS["tiny"]


def banner(ranks):
    """Returns what was told by name, and checks that the first rank alone did."""
    told = [[line for line in log_lines(rank.stderr) if line.level == "INFO"] for rank in ranks]
    assert not any(line.text.startswith(NAMES) for other in told[1:] for line in other)
    found = [line.text.partition(": ") for line in told[0] if line.text.startswith(NAMES)]
    assert [name for name, _, _ in found] == list(NAMES)
    return {name: text for name, _, text in found}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("flags", "world_size", "layout"),
    [
        ((), 1, "1 ranks (PP 1, DP 1, TP 1, EP 1); "),
        (("--pipeline-model-parallel-size=2",), 2, "2 ranks (PP 2, DP 1, TP 1, EP 1); "),
        (("--expert-model-parallel-size=2",), 2, "2 ranks (PP 1, DP 2, TP 1, EP 2); "),
        (
            ("--tensor-model-parallel-size=2", "--sequence-parallel"),
            2,
            "2 ranks (PP 1, DP 1, TP 2, EP 1); ",
        ),
        (
            (
                "--tensor-model-parallel-size=2",
                "--sequence-parallel",
                "--expert-tensor-parallel-size=1",
                "--expert-model-parallel-size=2",
                "--use-distributed-optimizer",
            ),
            4,
            "4 ranks (PP 1, DP 2, TP 2, EP 2); ",
        ),
    ],
    ids=["alone", "pp", "ep", "tp", "etp"],
)
def test_each_parameter_counts_once_in_every_layout(
    megatron_fork_server, flags, world_size, layout
):
    argv = ["--train-iters=1", "--eval-iters=0", *flags]
    result = megatron_fork_server.run(run_tiny, world_size=world_size, args=[argv]).check()
    assert result.values == (0,) * world_size
    told = banner(result.ranks)
    alone = megatron_fork_server.run(run_tiny, world_size=1, args=[argv[:2]]).check()
    assert told["model"] == banner(alone.ranks)["model"]
    assert told["layout"].startswith(layout)
    assert told["begins"] == "with step 1 of 1, from initial weights"
    assert told["protected by"].startswith("off: ")


@pytest.mark.distributed
def test_it_tells_which_checkpoint_a_job_begins_with(megatron_fork_server, tmp_path):
    argv = ["--train-iters=4", "--eval-iters=0", f"--save={tmp_path}", f"--load={tmp_path}"]
    first = [*argv, "--exit-interval=3"]
    assert megatron_fork_server.run(run_tiny, world_size=1, args=[first]).check().values == (0,)
    result = megatron_fork_server.run(run_tiny, world_size=1, args=[argv]).check()
    told = banner(result.ranks)
    assert told["begins"] == "with step 4 of 4, from the checkpoint of that state"
    assert f"--load {tmp_path}" in told["run"]


BASE = (
    *("--model-preset", "tiny", "--mock-data", "--tokenizer-type", "ByteTokenizer"),
    *("--micro-batch-size", "1", "--global-batch-size", "1", "--train-iters", "7"),
)


def test_flags_apart_from_their_defaults_are_told_as_they_are_given():
    given = (
        *(*BASE, "--lr", "0.25", "--bf16", "--moevement-faults", "3:forward", "stop:4:commit"),
        *("--no-bias-swiglu-fusion", "--clip-grad", "1.0", "--log-interval", "100"),
    )
    told = told_flags(parse(given, 1))
    assert "flags, precision: --bf16" in told
    assert "flags, optimization: --lr 0.25" in told
    assert "flags, fault injection: --moevement-faults kill:3:forward stop:4:commit" in told
    assert not any(line.startswith("flags, logging") for line in told)
    words = [word for line in told for word in line.partition(": ")[2].split()]
    assert told_flags(parse(words, 1)) == told


def test_of_routed_experts_those_that_a_token_uses_are_active():
    arguments = parse((*BASE, "--lr", "0.1"), 1)
    routed = (TINY.total - TINY.active) * 8 // 6
    assert told_model(arguments, TINY.total, routed) == (
        f"model: {TINY.total:,} parameters, {TINY.active:,} active for a token: top 2 of 8 "
        "experts, 4 layers, hidden size 128"
    )
