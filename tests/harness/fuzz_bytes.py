# SPDX-License-Identifier: Apache-2.0
"""Random and mutated bytes and JSON documents, drawn from a seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

_ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**31, 2**63, 2**64, 2**70, 1e308, float("nan"), "", "x" * 300, "\0"),
    *([], {}, [[]], "pp0.dp0.tp0.cp0.ep0", "pp99999999999999999999.dp0.tp0.cp0.ep0", "\ud800"),
    *([0, 1, 2], {"step": 1}, "ff" * 32, -0.0, [None], [2**70, 0]),
)
_DEEP = (b"[" * 100_000, b'{"a":' * 50_000)
_MAX_BYTES = 5000


def mutated(random: Random, examples: Sequence[bytes]) -> bytes:
    """Returns an example with some changes, or something else altogether."""
    if random.random() < 0.1:
        return random.randbytes(random.randrange(_MAX_BYTES))
    if random.random() < 0.02:
        return random.choice(_DEEP)
    data = bytearray(random.choice(examples))
    for _ in range(random.choice((1, 1, 2, 5, 20))):
        _change(random, data)
    return bytes(data)


def _change(random: Random, data: bytearray) -> None:
    at = random.randrange(len(data) + 1)
    size = random.choice((1, 1, 2, 4, 8, 64))
    match random.randrange(6):
        case 0:
            data[at : at + size] = random.randbytes(size)
        case 1:
            del data[at : at + size]
        case 2:
            data[at:at] = data[random.randrange(len(data) + 1) :][: size * 8]
        case 3:
            data[at : at + size] = random.choice((b"\0", b"\xff")) * size
        case 4:
            del data[at:]
        case _:
            if at < len(data):
                data[at] ^= 1 << random.randrange(8)


def mutated_document(random: Random, example: Any) -> Any:
    """Returns a JSON document with one value in it that is something else, or is gone."""
    if random.random() < 0.15 or not isinstance(example, dict | list) or not example:
        return random.choice(_ODD)
    if isinstance(example, dict):
        name = random.choice(list(example))
        changed = dict(example)
        if random.random() < 0.2:
            del changed[name]
        else:
            changed[name] = mutated_document(random, example[name])
        return changed
    at = random.randrange(len(example))
    return [*example[:at], mutated_document(random, example[at]), *example[at + 1 :]]


def as_document(random: Random, example: Any) -> dict[str, Any]:
    """Returns a mutated document that is an object, as messages demand, and that JSON can hold."""
    changed = mutated_document(random, example)
    found = changed if isinstance(changed, dict) else {"process": changed}
    return dict(json.loads(json.dumps(found)))
