# SPDX-License-Identifier: Apache-2.0
"""Parts of JSON documents: read strictly; what is wrong is told with its path.

Readers take a value and return what it is, or raise a WrongPartError.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from megatron_moevement.errors import MoEvementError

T = TypeVar("T")
E = TypeVar("E", bound=Enum)


class WrongPartError(MoEvementError, ValueError):
    """A part of a document is not what it must be.

    Its path is put together on the way out: what is right, and a job reads a hundred parts of each
    of its processes, costs none.
    """

    def __init__(self, text: str) -> None:
        """Says what is wrong, to be read after the path."""
        super().__init__(text)
        self._text = text
        self._path = ""

    def below(self, name: str | int) -> None:
        """Tells the name of the part, then that of what it is a part of, and so on."""
        inner = f"[{name}]" if isinstance(name, int) else f".{name}"
        self._path = f"{inner}{self._path}"

    def __str__(self) -> str:
        return f"{self._path.removeprefix('.')}{self._text}"


def at(name: str | int, read: Callable[[Any], T], value: Any) -> T:
    """Returns what `read` makes of the part of that name."""
    try:
        return read(value)
    except WrongPartError as error:
        error.below(name)
        raise


def part(document: dict[str, Any], name: str, read: Callable[[Any], T], absent: T) -> T:
    """Returns what `read` makes of a part, `absent` where it is null or left out."""
    value = document.get(name)
    return absent if value is None else at(name, read, value)


def each(read: Callable[[Any], T], value: Any) -> tuple[T, ...]:
    """Returns what `read` makes of each part of a list."""
    if not isinstance(value, list):
        raise wrong(value, "a list")
    made: list[T] = []
    try:
        for item in value:
            made.append(read(item))
    except WrongPartError as error:
        error.below(len(made))
        raise
    return tuple(made)


def wrong(value: Any, wanted: str) -> WrongPartError:
    """Returns the error of a part that has another value than is wanted."""
    found = json.dumps(value)
    found = found if len(found) <= 40 else found[:37] + "..."
    return WrongPartError(f" is {found}, must be {wanted}")


class Fields(NamedTuple):
    """The fields that an object must have, and all that it may have."""

    required: tuple[str, ...]
    known: frozenset[str]

    @classmethod
    def of(cls, required: Iterable[str], optional: Iterable[str] = ()) -> Fields:
        """Returns the fields of these names."""
        return cls(tuple(required), frozenset((*required, *optional)))

    def read(self, value: Any) -> dict[str, Any]:
        """Returns an object that has them."""
        if not isinstance(value, dict):
            raise wrong(value, "an object")
        for name in self.required:
            if name not in value:
                raise WrongPartError(f" has no {name!r}")
        if not value.keys() <= self.known:
            strange = next(name for name in value if name not in self.known)
            raise WrongPartError(f" has a strange field {strange!r}")
        return value


def integer(value: Any, least: int = 0) -> int:
    """Returns a whole number that is not too small."""
    if type(value) is not int or value < least:
        raise wrong(value, f"a whole number of at least {least}")
    return value


def positive(value: Any) -> int:
    """Returns a whole number of at least 1."""
    return integer(value, 1)


def integers(value: Any) -> list[int]:
    """Returns whole numbers of at least 0."""
    if not isinstance(value, list):
        raise wrong(value, "a list")
    for place, item in enumerate(value):
        if type(item) is not int or item < 0:
            at(place, integer, item)
    return value


def seconds(value: Any) -> float:
    """Returns a time in seconds."""
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise wrong(value, "a number of seconds")
    return float(value)


def truth(value: Any) -> bool:
    """Returns what is true or false."""
    if not isinstance(value, bool):
        raise wrong(value, "true or false")
    return value


def text(value: Any) -> str:
    """Returns a text."""
    if not isinstance(value, str):
        raise wrong(value, "a text")
    return value


def one_of(kind: type[E], value: Any) -> E:
    """Returns the member of an enum that has this value."""
    for member in kind:
        if member.value == value:
            return member
    raise wrong(value, "one of " + ", ".join(json.dumps(member.value) for member in kind))


def built(build: Callable[..., T], *values: Any, **fields: Any) -> T:
    """Returns what `build` makes; what it refuses is told with the path."""
    try:
        return build(*values, **fields)
    except ValueError as error:
        raise WrongPartError(f": {error}") from error
