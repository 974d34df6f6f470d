# SPDX-License-Identifier: Apache-2.0
"""What a data set holds, in a digest that costs the same for a megabyte and for terabytes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from megatron_moevement.training.data.manifest import manifest_path

_WHOLE_BYTES = 4 << 20
_BLOCK_BYTES = 16 << 10
_BLOCKS = 256


def tokens_digest(prefix: str) -> str:
    """Returns a digest of the tokens of a data set: where its files lie is not in it.

    A `.bin` file of up to 4 MiB is read as a whole. Of a larger one count its size and 256 blocks
    of 16 KiB at equal distances, the first and the last among them, and the manifest beside it
    (`moevement data prepare` writes into it a digest of all that was read), where there is one.

    Args:
        prefix: path without `.bin` and `.idx`.

    Raises:
        OSError: a file can't be read.
    """
    digest = hashlib.sha256()
    manifest = manifest_path(prefix)
    if manifest.exists():
        digest.update(manifest.read_bytes())
    with Path(f"{prefix}.bin").open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        digest.update(f"{size_bytes}\n".encode())
        for start, length in _blocks(size_bytes):
            digest.update(os.pread(file.fileno(), length, start))
    return digest.hexdigest()


def _blocks(size_bytes: int) -> list[tuple[int, int]]:
    """Returns offset and length of what is read."""
    if size_bytes <= _WHOLE_BYTES:
        return [(0, size_bytes)]
    last = size_bytes - _BLOCK_BYTES
    return [(last * block // (_BLOCKS - 1), _BLOCK_BYTES) for block in range(_BLOCKS)]
