# SPDX-License-Identifier: Apache-2.0
"""Group references: survivors of a restart keep their objects and get new process groups.

Model, optimizer and schedules hold process groups in plain attributes and items. Building them anew
would take their memory twice and the time of a start. So where each group is kept is found once,
by walking from the live objects, and after a restart the groups of the same names are set there.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_moevement.errors import MoEvementError

_WORLD = "WORLD"
_ATOMS = (str, bytes, int, float, bool, type(None), torch.dtype, torch.device, type)
_PLAIN = frozenset(_ATOMS)
"""Most of what is there is of just these types, which is seen at once."""


class UnnamedGroupError(MoEvementError, RuntimeError):
    """A group that nobody could replace: it has no name, or is kept where nothing can be set."""


class _Place(Enum):
    ATTRIBUTE = "attribute"
    ITEM = "item"
    FIXED = "fixed"
    """Of a tuple, a set or a bound method: nothing can be set there."""


class _Kept(NamedTuple):
    """Where something is kept: in which object, under which key, and where that one is kept.

    Thousands are made while a process joins a job that waits for it.
    """

    owner: Any
    key: Any
    value: Any
    place: _Place
    parent: _Kept | None

    @property
    def path(self) -> str:
        """How to get there. Thousands are visited and hardly one is asked for its path."""
        # A key may be a tensor, whose text is all its numbers.
        key = self.key if isinstance(self.key, (str, int)) else type(self.key).__name__
        if self.parent is None:
            return str(key)
        before = self.parent.path
        return f"{before}[{key!r}]" if self.place is _Place.ITEM else f"{before}.{key}"

    def set(self, value: Any) -> None:
        if self.place is _Place.ITEM:
            self.owner[self.key] = value
        elif hasattr(self.owner, "__dict__"):
            self.owner.__dict__[self.key] = value  # past the checks of modules
        else:
            setattr(self.owner, self.key, value)


class ReleasedGroupError(MoEvementError, RuntimeError):
    """A process group of a former generation is used: a restart did not replace it."""


class _ReleasedGroup:
    """Lies where a group was. Not None: for torch, that is the group of the whole job."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ReleasedGroupError(f"`{name}` of a process group that no restart has replaced")


_RELEASED = _ReleasedGroup()


class GroupReferences:
    """Every place from which the live objects of a rank reach a process group."""

    def __init__(self, roots: Iterable[Any]) -> None:
        """Finds them; walks over all that lives, so once, at start.

        Args:
            roots: model chunks, optimizer, config, and whatever else outlives a restart.

        Raises:
            UnnamedGroupError: a group could not be replaced after a restart.
        """
        names = {id(group): name for name, group in named_groups().items()}
        self._references = [self._named(kept, names) for kept in _groups_in(list(roots))]

    def __len__(self) -> int:
        return len(self._references)

    @property
    def names(self) -> frozenset[str]:
        """The names of the groups that are referred to."""
        return frozenset(name for _, name in self._references)

    def rebind(self) -> None:
        """Sets the present groups wherever the former ones of their names were."""
        groups = named_groups()
        for kept, name in self._references:
            kept.set(groups[name])

    def release(self) -> None:
        """Empties all these places, so that nothing keeps the former groups alive."""
        for kept, _ in self._references:
            kept.set(_RELEASED)

    @staticmethod
    def _named(kept: _Kept, names: dict[int, str]) -> tuple[_Kept, str]:
        name = names.get(id(kept.value))
        if name is None or kept.place is _Place.FIXED:
            why = "has no name" if name is None else "lies where nothing can be set"
            raise UnnamedGroupError(
                f"the process group at {kept.path} {why}: a restart could not replace it"
            )
        # With the value the first generation's groups would never end.
        return kept._replace(value=None, parent=None), name


def named_groups() -> dict[str, dist.ProcessGroup]:
    """Returns the job's present groups by the names under which Megatron knows them.

    Groups of one member list may have several names; each process takes the same for each place,
    since the first name of a group wins.
    """
    world = dist.group.WORLD
    assert world is not None
    found: dict[str, dist.ProcessGroup] = {_WORLD: world}
    for name, value in sorted(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup):
            found[name] = value
        elif isinstance(value, list):
            groups = [one for one in value if isinstance(one, dist.ProcessGroup)]
            found |= {f"{name}[{place}]": group for place, group in enumerate(groups)}
    return found


def _groups_in(roots: list[Any]) -> Iterator[_Kept]:
    """Yields every place of a group that can be reached from the roots."""
    seen: set[int] = set()
    pending = [
        _Kept(None, f"root{number}", root, _Place.FIXED, None) for number, root in enumerate(roots)
    ]
    while pending:
        visited = pending.pop()
        value = visited.value
        if id(value) in seen or isinstance(value, (*_ATOMS, types.ModuleType)):
            continue
        seen.add(id(value))
        for kept in _parts_of(value, visited):
            if type(kept.value) in _PLAIN:
                continue
            if isinstance(kept.value, dist.ProcessGroup):
                yield kept
            else:
                pending.append(kept)


@functools.singledispatch
def _parts_of(value: Any, parent: _Kept) -> Iterator[_Kept]:
    """Yields what an object keeps: by default, its attributes."""
    for key, part in getattr(value, "__dict__", {}).items():
        yield _Kept(value, key, part, _Place.ATTRIBUTE, parent)


@_parts_of.register
def _(value: dict, parent: _Kept) -> Iterator[_Kept]:  # type: ignore[type-arg]
    for key, part in value.items():
        yield _Kept(value, key, part, _Place.ITEM, parent)


@_parts_of.register
def _(value: list, parent: _Kept) -> Iterator[_Kept]:  # type: ignore[type-arg]
    for place, part in enumerate(value):
        yield _Kept(value, place, part, _Place.ITEM, parent)


@_parts_of.register(tuple)
@_parts_of.register(set)
@_parts_of.register(frozenset)
def _(value: Iterable[Any], parent: _Kept) -> Iterator[_Kept]:
    for part in value:
        yield _Kept(value, None, part, _Place.FIXED, parent)


@_parts_of.register(functools.partial)
@_parts_of.register(types.MethodType)
def _(value: Any, parent: _Kept) -> Iterator[_Kept]:
    for key in ("func", "args", "keywords", "__self__"):
        if hasattr(value, key):
            yield _Kept(value, key, getattr(value, key), _Place.FIXED, parent)


@_parts_of.register
def _(value: types.FunctionType, parent: _Kept) -> Iterator[_Kept]:
    cells: tuple[types.CellType, ...] = value.__closure__ or ()
    for cell in cells:
        with contextlib.suppress(ValueError):  # a cell that is empty yet
            part = cell.cell_contents
            yield _Kept(cell, "cell_contents", part, _Place.ATTRIBUTE, parent)


@_parts_of.register
def _(value: torch.Tensor, parent: _Kept) -> Iterator[_Kept]:
    for key, part in value.__dict__.items():
        yield _Kept(value, key, part, _Place.ATTRIBUTE, parent)
    if value._backward_hooks:  # noqa: SLF001  (no public way to them)
        yield _Kept(value, "hooks", value._backward_hooks, _Place.FIXED, parent)  # noqa: SLF001
