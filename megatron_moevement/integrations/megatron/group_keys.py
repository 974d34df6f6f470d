# SPDX-License-Identifier: Apache-2.0
"""Keys of the optimizer's parameter groups, which upstream gathers from all ranks.

Every rank makes a group for every key that any rank has. A process that takes the place of a lost
one builds its optimizer when the others don't, so it is given what they gathered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum
from itertools import chain
from typing import Any

import torch.distributed as dist

from megatron_moevement.runtime.rebindings import rebind

GatheredKeys = list[Any]
"""For each gathering of a build the keys that any rank has, as met first; what JSON can hold."""


class OwnKeys(Enum):
    """Keys of a rank that is built for its sizes."""

    ALONE = "alone"
    """Those that others have would only make empty groups."""


_gather_upstream = dist.all_gather_object


@contextlib.contextmanager
def gathered_keys(known: GatheredKeys | OwnKeys | None) -> Iterator[GatheredKeys]:
    """Encloses the construction of an optimizer, by all ranks at once or by this one alone.

    Args:
        known: what the other ranks gathered; None: they gather now.

    Yields:
        A list that receives what was gathered. Upstream makes nothing of who has a key, and a list
        for each of thousands of ranks is long.
    """
    found: GatheredKeys = []

    def gather(answers: list[Any], own: Any, group: Any = None, **_: Any) -> None:
        if known is None:
            _gather_upstream(answers, own, group)
        elif isinstance(known, OwnKeys):
            answers[:] = [own]
        else:
            answers[:] = [[_tupled(key) for key in known[len(found)]]]
        found.append([_listed(key) for key in dict.fromkeys(chain.from_iterable(answers))])

    rebind("torch.distributed:all_gather_object", gather)
    try:
        yield found
    finally:
        gather_as_upstream()


def gather_as_upstream() -> None:
    """Lets objects be gathered as upstream does; after an interrupt, nobody else has done it."""
    rebind("torch.distributed:all_gather_object", _gather_upstream)


def _listed(value: Any) -> Any:
    """Returns nested tuples as nested lists, as JSON has them."""
    return [_listed(one) for one in value] if isinstance(value, (tuple, list)) else value


def _tupled(value: Any) -> Any:
    """Returns nested lists as nested tuples, which can be hashed."""
    return tuple(_tupled(one) for one in value) if isinstance(value, list) else value
