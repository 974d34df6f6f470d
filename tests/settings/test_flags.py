# SPDX-License-Identifier: Apache-2.0
"""Flags declared as fields: types, ranges, lists and negations."""

import argparse
import dataclasses
import enum

import pytest

from megatron_moevement.settings import flags
from megatron_moevement.settings.flags import add_flags, flag, flag_name, read_flags


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass(frozen=True)
class Group:
    size: int | None = flag(None, "a size", within=flags.AT_LEAST_1)
    rate: float = flag(0.5, "a rate", within=flags.PROBABILITY)
    factor: float = flag(1.0, "any finite number")
    rates: tuple[float, ...] = flag((0.0,), "rates", nargs="+", within=flags.NOT_NEGATIVE)
    name: str = flag("a", "a name", choices=("a", "b"))
    colour: Colour = flag(Colour.RED, "a colour")
    off: bool = flag(False, "turns on")
    on: bool = flag(True, "turns off")


def read(*words):
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, "group", Group)
    return read_flags(Group, parser.parse_args(words))


def test_without_flags_the_fields_have_their_defaults():
    assert read() == Group()


def test_each_type_is_read():
    words = "--size 3 --rate 0.25 --factor -2 --rates 1 2.5 --name b --colour blue --off --no-on"
    assert read(*words.split()) == Group(
        3, 0.25, -2.0, (1.0, 2.5), "b", Colour.BLUE, off=True, on=False
    )


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--size 0", "0 is not at least 1"),
        ("--size 1.5", "'1.5' is no integer"),
        ("--rate 1", "1 is not at least 0 and below 1"),
        ("--rate=-0.1", "-0.1 is not at least 0 and below 1"),
        ("--rate much", "'much' is no number"),
        ("--factor nan", "nan is not finite"),
        ("--factor inf", "inf is not finite"),
        ("--factor=-inf", "-inf is not finite"),
        ("--rates 1 -1", "-1 is not 0 or more"),
        ("--colour green", "'green' is none of red, blue"),
        ("--name c", "invalid choice"),
    ],
)
def test_what_is_out_of_range_is_refused_with_the_range(words, reason):
    with pytest.raises(argparse.ArgumentError, match=reason) as refused:
        read(*words.split())
    assert refused.value.argument_name == words.split()[0].split("=")[0]


def test_a_field_that_is_true_by_default_has_a_flag_that_clears_it():
    names = [flag_name(field) for field in dataclasses.fields(Group)]
    assert names[-2:] == ["--off", "--no-on"]


@pytest.mark.parametrize(
    ("within", "inside", "outside"),
    [
        (flags.POSITIVE, [1e-30, 5], [0, -1]),
        (flags.NOT_NEGATIVE, [0, 5], [-1e-30]),
        (flags.AT_LEAST_1, [1, 2], [0]),
        (flags.PROBABILITY, [0, 0.999], [1, -0.1]),
        (flags.SHARE, [1, 0.1], [0, 1.1]),
        (flags.SEED, [0, 2**31 - 1], [-1, 2**31]),
    ],
)
def test_a_range_holds_its_ends_as_its_words_say(within, inside, outside):
    assert all(within.contains(value) for value in inside)
    assert not any(within.contains(value) for value in outside)
