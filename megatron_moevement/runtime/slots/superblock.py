"""The superblock of a journal: what a process must remember, and the commit that wrote it."""

from __future__ import annotations

import json
import struct

from megatron_moevement.policy.copies.journal_state import JournalState
from megatron_moevement.runtime.slots.mapped_file import checksum_of

SUPERBLOCK_BYTES = 1024
_CHECKSUM = struct.Struct("<Q")
_HEAD = struct.Struct("<QI")
"""After the checksum: number of the commit, length of the JSON."""


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
    return sequence, None if document is None else JournalState.out_of(document)
