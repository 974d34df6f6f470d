# SPDX-License-Identifier: Apache-2.0
"""Documents: frozen data as JSON, read back strictly by the types of its fields.

An enum is its value, a dataclass or a window an object, and what can be parsed (a rank) its name.
A tuple is a list. What older builds left out of a named tuple has its default; no field of another
class may be lacking.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache, partial
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

_NAMES = {"rollbacks": "era", "schedule_version": "epoch"}
"""Fields that have another name in documents."""


class Document:
    """Frozen data that files and messages hold; a dataclass inherits it."""

    def document(self) -> dict[str, Any]:
        """Returns it as what JSON can hold."""
        written: dict[str, Any] = _written(self)
        return written

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Self:
        """Returns what `document` returned.

        Raises:
            KeyError: a field is lacking.
            AttributeError, TypeError, ValueError: one is strange, or holds something else than its
                type says.
        """
        kind: Any = cls
        read: Self = _reader(kind)(document)
        return read

    @classmethod
    def out_of(cls, document: Mapping[str, Any]) -> Self:
        """Returns what stands among other fields; raises as `of_document` does."""
        kind: Any = cls
        return cls.of_document({name: document[name] for _, name, _ in _fields(kind)})


@cache
def _fields(kind: Any) -> tuple[tuple[str, str, Any], ...]:
    """Returns the fields of a class: its own name of each, that in documents, and the type."""
    return tuple(
        (name, _NAMES.get(name, name), each) for name, each in get_type_hints(kind).items()
    )


def _written(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {name: _written(one) for name, one in value.items()}
    if hasattr(value, "parse"):
        return str(value)
    if type(value) is tuple:
        return [_written(one) for one in value]
    if fields := _fields(value.__class__):
        return {name: _written(getattr(value, own)) for own, name, _ in fields}
    return value


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Returns what reads values of a type: each type is looked at once."""
    if get_origin(kind) is UnionType:
        read = _reader(get_args(kind)[0])
        return lambda value: None if value is None else read(value)
    if get_origin(kind) is Mapping:
        read = _reader(get_args(kind)[1])
        return lambda value: {name: read(one) for name, one in value.items()}
    if get_origin(kind) is tuple:
        read = _reader(get_args(kind)[0])
        return lambda value: tuple(map(read, value))
    whole = partial(_read_fields if _fields(kind) else _read_plain, kind)
    parse: Callable[[Any], Any] = getattr(kind, "parse", whole)
    return kind if issubclass(kind, Enum) else parse


def _read_fields(kind: Any, value: Any) -> Any:
    lacking = getattr(kind, "_field_defaults", {})  # of a named tuple
    known = {_NAMES.get(own, own): default for own, default in lacking.items()} | value
    if strange := known.keys() - {name for _, name, _ in _fields(kind)}:
        raise ValueError(f"{kind.__name__} has no field {min(strange)!r}")
    return kind(**{own: _reader(each)(known[name]) for own, name, each in _fields(kind)})


def _read_plain(kind: Any, value: Any) -> Any:
    if type(value) is not kind and (kind, type(value)) != (float, int):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    if kind is int and not 0 <= value < 2**63:
        raise ValueError(f"no count: {value!r}")
    return value
