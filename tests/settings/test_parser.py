# SPDX-License-Identifier: Apache-2.0
"""What the parser of both programs adds to argparse: defaults, units, proposals, the version."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_moevement import __version__
from megatron_moevement.cli import COMMANDS, main
from megatron_moevement.cli import build_parser as build_command
from megatron_moevement.errors import UserError
from megatron_moevement.settings.parser import Parser
from megatron_moevement.training.arguments import build_parser, parse

ROOT = Path(__file__).resolve().parents[2]
MEASURED = re.compile("timeout|interval|duration|[-_]time|wait|limit|bandwidth|bytes|grace|mtbf")
UNITS = re.compile(
    r"\b(seconds?|minutes|mins|hours|iterations?|steps|bytes|GB|GB/S|divisible|points|multiples)\b",
    re.IGNORECASE,
)


def parsers(parser):
    """Yields a parser and those of its sub-commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for own in action.choices.values():
                yield from parsers(own)


def flags_with_a_value(parser):
    return [
        (own, action)
        for own in parsers(parser)
        for action in own._actions
        if action.option_strings and action.nargs != 0 and action.help != argparse.SUPPRESS
    ]


def shown(parser, action):
    """Returns what `--help` prints of a flag."""
    formatter = parser._get_formatter()
    formatter.add_argument(action)
    return " ".join(formatter.format_help().split())


@pytest.mark.parametrize("build", [build_parser, build_command])
def test_every_flag_with_a_value_shows_its_default(build):
    found = flags_with_a_value(build())
    assert len(found) > 30
    for parser, action in found:
        text = shown(parser, action)
        assert "(default: " in text or "(required)" in text, text


@pytest.mark.parametrize("build", [build_parser, build_command])
def test_no_help_shows_how_it_is_put_together(build):
    texts = {own.prog: own.format_help() for own in parsers(build())}
    assert len(texts) > len(COMMANDS) or build is build_parser
    assert {name: text for name, text in texts.items() if "%(" in text or "%%" in text} == {}


@pytest.mark.parametrize("build", [build_parser, build_command])
def test_every_flag_that_measures_shows_its_unit(build):
    for parser, action in flags_with_a_value(build()):
        if MEASURED.search(action.option_strings[-1]):
            text = shown(parser, action).replace("-", " ")
            assert UNITS.search(text), text


def test_every_number_of_our_flags_has_a_unit_and_no_name_of_a_field():
    for parser, action in flags_with_a_value(build_parser()):
        if action.option_strings[-1].startswith(("--moevement-", "--inprocess-")):
            assert action.metavar or action.choices, shown(parser, action)


def test_defaults_are_shown_as_they_would_be_given():
    text = " ".join(build_parser().format_help().split())
    assert "load balancing, one or several (default: aux_loss)" in text
    assert "what is given up with a lost process (default: rank)" in text
    assert "smallest learning rate (default: 0.0)" in text


@pytest.mark.parametrize(
    ("given", "meant"),
    [("--num_layers", "--num-layers"), ("--hiden-size", "--hidden-size")],
)
def test_a_mistyped_flag_gets_a_proposal(given, meant):
    with pytest.raises(UserError, match=f"{given} 4; did you mean {meant}"):
        parse([given, "4"], 1)


def test_a_flag_like_no_other_gets_none():
    with pytest.raises(UserError) as refused:
        parse(["--quux"], 1)
    assert "did you mean" not in str(refused.value)


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["inspect", "--store_dir", "x"], "--store-dir"),
        (["data", "inspect", "x", "--token", "3"], "--tokens"),
    ],
)
def test_a_sub_command_proposes_its_own_flags(argv, meant, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"did you mean {meant}?" in error
    assert f"usage: moevement {argv[0]}" in error


def test_a_default_with_a_percent_sign_is_text():
    parser = Parser()
    parser.add_argument("--share", default="5%", help="a share")
    assert "a share (default: 5%)" in parser.format_help()


@pytest.mark.parametrize(
    ("program", "name"),
    [(["-m", "megatron_moevement.cli"], "moevement"), (["pretrain_moe.py"], "pretrain_moe.py")],
)
def test_the_version_is_told(program, name):
    command = [sys.executable, *program, "--version"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(
        rf"{name} {re.escape(__version__)} \(megatron-core 0\.16\.1\S*, torch 2\.\S+\)\n", told
    )
