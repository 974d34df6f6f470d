# SPDX-License-Identifier: Apache-2.0
"""Command-line flags declared as fields of frozen dataclasses.

A group of flags is a dataclass beside its checks. `add_flags` makes the argparse group of such a
dataclass, `read_flags` makes the dataclass of the parsed arguments. The field `num_layers` is the
flag `--num-layers`; a boolean field that defaults to False is set by its flag, one that defaults to
True is cleared by `--no-...`. A number is finite, and within the range that its field names.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that a flag takes."""

    words: str
    contains: Callable[[float], bool]


POSITIVE = Range("above 0", lambda value: value > 0)
NOT_NEGATIVE = Range("0 or more", lambda value: value >= 0)
AT_LEAST_1 = Range("at least 1", lambda value: value >= 1)
PROBABILITY = Range("at least 0 and below 1", lambda value: 0 <= value < 1)
SHARE = Range("above 0 and at most 1", lambda value: 0 < value <= 1)
SEED = Range("at least 0 and below 2**31", lambda value: 0 <= value < 2**31)


def flag(
    default: Any,
    help: str,  # noqa: A002  (argparse's word)
    *,
    choices: tuple[str, ...] | None = None,
    within: Range | None = None,
    parse: Callable[[str], Any] | None = None,
    nargs: str | None = None,
    metavar: str | None = None,
) -> Any:
    """Declares one field of a dataclass as a flag.

    Args:
        help: one line for `--help`.
        choices: the only strings allowed.
        within: the only numbers allowed.
        parse: makes the value of the string; by default the field's type does.
        nargs: as in argparse; the field is then a tuple.
        metavar: the name of the value in `--help`.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "within": within,
        "parse": parse,
        "nargs": nargs,
        "metavar": metavar,
    }
    return dataclasses.field(default=default, metadata=metadata)


positive = functools.partial(flag, within=POSITIVE)
seconds = functools.partial(flag, within=POSITIVE, metavar="SECONDS")
not_negative = functools.partial(flag, within=NOT_NEGATIVE)
count = functools.partial(flag, within=AT_LEAST_1)
probability = functools.partial(flag, within=PROBABILITY)


def flag_name(field: dataclasses.Field[Any]) -> str:
    """Returns the flag of a field, such as `--num-layers`."""
    prefix = "--no-" if field.default is True else "--"
    return prefix + field.name.replace("_", "-")


def add_flags(
    parser: argparse.ArgumentParser,
    title: str,
    group: type[Any],
    names: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Adds one argparse group with the flags of the dataclass `group`.

    Args:
        names: by field, the only strings that a flag takes where its dataclass can't list them.
    """
    arguments = parser.add_argument_group(title)
    types_of = typing.get_type_hints(group)
    for field in dataclasses.fields(group):
        _add_flag(arguments, field, types_of[field.name], names.get(field.name))


def read_flags(group: type[T], values: argparse.Namespace | Mapping[str, Any]) -> T:
    """Returns the dataclass `group` filled from parsed arguments (or a mapping of them)."""
    mapping = vars(values) if isinstance(values, argparse.Namespace) else values
    fields = dataclasses.fields(typing.cast(Any, group))
    taken = {field.name: mapping[field.name] for field in fields}
    return group(**{name: tuple(v) if isinstance(v, list) else v for name, v in taken.items()})


def flags_apart_from_defaults(values: Any) -> list[str]:
    """Returns the flags, with their values, in which a filled dataclass differs from its defaults.

    Args:
        values: of a group of flags.
    """
    found = []
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        if value != field.default:
            found.append(flag_name(field))
            found += [] if isinstance(value, bool) else [as_given(value)]
    return found


def as_given(value: Any) -> str:
    """Returns a value as a user would give it; what there is none of is `none`."""
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, (list, tuple)):
        return " ".join(map(as_given, value)) or "none"
    return "none" if value is None or value == "" else str(value)


def _add_flag(
    arguments: argparse._ArgumentGroup,
    field: dataclasses.Field[Any],
    kind: Any,
    names: Sequence[str] | None,
) -> None:
    metadata = field.metadata
    options: dict[str, Any] = {"dest": field.name, "default": field.default}
    options["help"] = metadata["help"]
    kind = _without_none(kind)
    if kind is bool:
        options["action"] = "store_false" if field.default is True else "store_true"
    else:
        one = typing.get_args(kind)[0] if metadata["nargs"] else kind
        if names is not None:
            one = _one_of(names)
        elif isinstance(kind, type) and issubclass(kind, enum.Enum):
            names = [str(member.value) for member in kind]
        options["type"] = reader(metadata["parse"] or one, metadata["within"])
        options["nargs"] = metadata["nargs"]
        if names is not None:
            options["metavar"] = "{" + ",".join(names) + "}"
        else:
            options["choices"] = metadata["choices"]
            options["metavar"] = metadata["metavar"]
    arguments.add_argument(flag_name(field), **options)


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text!r} is none of {', '.join(names)}")
        return text

    return convert


def reader(convert: Callable[[str], Any], within: Range | None) -> Callable[[str], Any]:
    """Returns what makes the value of a string; it raises argparse's error with the reason.

    Also a `type` of argparse where a flag is no field.
    """

    def read(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(_reason(text, convert, error)) from error
        if isinstance(value, float) and not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text} is not finite")
        if within is not None and not within.contains(value):
            raise argparse.ArgumentTypeError(f"{text} is not {within.words}")
        return value

    return read


def _reason(text: str, convert: Callable[[str], Any], error: ValueError) -> str:
    if convert is int:
        return f"{text!r} is no integer"
    if convert is float:
        return f"{text!r} is no number"
    if isinstance(convert, type) and issubclass(convert, enum.Enum):
        return f"{text!r} is none of {', '.join(str(member.value) for member in convert)}"
    return str(error)


def _without_none(kind: Any) -> Any:
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return kind
    members = [member for member in typing.get_args(kind) if member is not type(None)]
    return members[0] if len(members) == 1 else kind
