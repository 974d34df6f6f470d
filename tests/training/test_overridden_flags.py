# SPDX-License-Identifier: Apache-2.0
"""What launch scripts do to flags: they override them, and write numbers in other ways."""

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.training.arguments import build_parser
from megatron_moevement.training.refusals import resolve
from tests.harness.tiny_job import tiny_arguments

SETTINGS = build_parser().flags
OVERRIDDEN = {
    "--context-parallel-size 2 --context-parallel-size 1": "context parallelism",
    "--context-parallel-size=2 --context-parallel-size=1": "context parallelism",
    "--moe-token-dispatcher-type flex --moe-token-dispatcher-type=alltoall": (
        "flexible token dispatcher"
    ),
    "--optimizer sgd --optimizer adam": "other optimizer",
}


def asked(flags):
    return dict(resolve(flags.split(), SETTINGS).refused)


@pytest.mark.parametrize("flags", OVERRIDDEN)
def test_a_flag_that_is_given_twice_counts_as_it_was_given_last(flags):
    assert asked(flags) == {}
    first, last = flags.replace("=", " ").split("--")[1:]
    tiny_arguments(*flags.split())
    assert list(asked(f"--{last} --{first}")) == [OVERRIDDEN[flags]]
    assert asked(f"--{last} --{first}") == asked(f"--{first}")


def test_a_flag_that_is_given_twice_keeps_its_last_values():
    flags = "--recompute-modules mlp --recompute-modules moe core_attn"
    given = tiny_arguments("--recompute-granularity=selective", *flags.split())
    assert given.architecture.recompute_modules == ("moe", "core_attn")


@pytest.mark.parametrize(
    "flags",
    ["--glu-linear-offset 0", "--rotary-seq-len-interpolation-factor 1.0", "--mtp-num-layers 00"],
)
def test_a_number_says_what_is_the_case_however_it_is_written(flags):
    assert asked(flags) == {}
    assert asked(flags.partition(" ")[0] + " 2") != {}


def test_a_flag_belongs_to_the_feature_with_the_longest_beginning_of_its_name():
    assert list(asked("--hybrid-context-parallel")) == ["context parallelism"]
    assert list(asked("--hybrid-override-pattern M*")) == ["other kinds of models"]


@pytest.mark.parametrize(
    "flags",
    ["--exit-signal SIGINT", "--rope-type yarn", "--padded-vocab-size 151936", "--cpu-offloading"],
)
def test_a_refusal_names_the_flag_and_its_value(flags):
    with pytest.raises(UserError, match=rf"not supported: [a-z ]+ \({flags}\)"):
        tiny_arguments(*flags.split())


@pytest.mark.parametrize("flags", ["--exit-signal SIGTERM", "--rope-type rope"])
def test_what_is_the_case_is_accepted(flags):
    assert tiny_arguments(*flags.split()).without_effect == ()


@pytest.mark.parametrize("word", ["--bf16 --fp16", "--bf16\r", "--bf16\u00a0", ""])
def test_a_word_that_looks_like_a_flag_is_shown_with_quotes(word):
    """A quoted variable is one word, and a script may have the line ends of Windows."""
    with pytest.raises(UserError) as raised:
        tiny_arguments(word)
    assert f"unrecognized arguments: {word!r}" in str(raised.value)
