# SPDX-License-Identifier: Apache-2.0
"""Reads what Weights & Biases keeps of a run while it sends nothing: a log of protocol buffers.

Its frames are those of LevelDB's log: blocks of 32 KiB with chunks of a checksum, a length and a
type (whole, first, middle, last).
"""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER_BYTES = 7
_BLOCK_BYTES = 1 << 15
_CHUNK = struct.Struct("<IHB")
_WHOLE, _LAST = 1, 4


def wandb_history(path: Path) -> dict[int, dict[str, Any]]:
    """Returns the scalars of a run by step, without what Weights & Biases adds."""
    found: dict[int, dict[str, Any]] = {}
    for record in _records(path):
        if record.WhichOneof("record_type") == "history":
            row = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            own = {name: value for name, value in row.items() if not name.startswith("_")}
            if own:
                found[record.history.step.num] = own
    return found


def wandb_configuration(path: Path) -> dict[str, Any]:
    """Returns the configuration that a run was begun with."""
    found: dict[str, Any] = {}
    for record in _records(path):
        if record.WhichOneof("record_type") == "run":
            update = record.run.config.update
            found |= {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in update}
    return found


def _records(path: Path) -> Iterator[Any]:
    record_type = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    for payload in _payloads(path.read_bytes()):
        yield record_type.FromString(payload)


def _payloads(data: bytes) -> Iterator[bytes]:
    begun, position = b"", _HEADER_BYTES
    while position + _CHUNK.size <= len(data):
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < _CHUNK.size:
            position += left
            continue
        _, length, kind = _CHUNK.unpack_from(data, position)
        if not kind:
            return
        position += _CHUNK.size
        begun += data[position : position + length]
        position += length
        if kind in {_WHOLE, _LAST}:
            yield begun
            begun = b""
