"""What a process must remember of its place in the run, and its superblock in the journal."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping
from typing import Any

from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.slots.mapped_file import checksum_of

SUPERBLOCK_BYTES = 1024
_CHECKSUM = struct.Struct("<Q")
_HEAD = struct.Struct("<QI")
"""After the checksum: number of the commit, length of the JSON."""


@dataclasses.dataclass(frozen=True)
class JournalState:
    """What a process must remember of its place in the run.

    Attributes:
        rollbacks: how many rollbacks to a durable checkpoint lie behind it.
        schedule_version: of the window schedule in force.
        committed: k, the newest step that it committed.
        persisted: the newest window that it knows to be persisted.
        rank: the logical rank that it occupies; None for a spare.
    """

    rollbacks: int
    schedule_version: int
    committed: int
    persisted: Window | None
    rank: LogicalRank | None

    def document(self) -> dict[str, Any]:
        """Returns the state as what JSON can hold."""
        return {
            "era": self.rollbacks,
            "epoch": self.schedule_version,
            "committed": self.committed,
            "persisted": None if self.persisted is None else self.persisted.document,
            "rank": None if self.rank is None else str(self.rank),
        }

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> JournalState:
        """Returns the state of a document that `document` made."""
        window, rank = document["persisted"], document["rank"]
        return cls(
            rollbacks=document["era"],
            schedule_version=document["epoch"],
            committed=document["committed"],
            persisted=None
            if window is None
            else Window(window["start"], window["size"], window.get("epoch", 0)),
            rank=None if rank is None else LogicalRank.parse(rank),
        )


def encode_superblock(sequence: int, state: JournalState | None) -> bytes:
    """Returns the bytes of a superblock, which begin with their checksum.

    Args:
        sequence: number of the commit that writes it.
        state: None before a first one.
    """
    text = json.dumps(None if state is None else state.document()).encode()
    body = _HEAD.pack(sequence, len(text)) + text
    body_bytes = SUPERBLOCK_BYTES - _CHECKSUM.size
    if len(body) > body_bytes:
        raise ValueError(f"a state of {len(text)} bytes does not fit: {state}")
    body = body.ljust(body_bytes, b"\0")
    return _CHECKSUM.pack(checksum_of(body)) + body


def decode_superblock(block: bytes) -> tuple[int, JournalState | None] | None:
    """Returns number and state of a superblock, None for one that is torn or damaged."""
    body = block[_CHECKSUM.size :]
    if block[: _CHECKSUM.size] != _CHECKSUM.pack(checksum_of(body)):
        return None
    sequence, length = _HEAD.unpack_from(body)
    document = json.loads(body[_HEAD.size : _HEAD.size + length])
    return sequence, None if document is None else JournalState.of_document(document)
