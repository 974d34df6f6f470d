# SPDX-License-Identifier: Apache-2.0
"""The manifest beside a prepared data set: where its tokens come from, and how many there are.

Light on purpose (no torch): argument checking reads it before Megatron-Core is imported.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from megatron_moevement.errors import UserError

FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Source:
    """What was read: `sha256` covers names and contents in the order they were written."""

    files: int
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Facts about `PREFIX.bin` and `PREFIX.idx`; the same input gives the same manifest.

    `unigram_entropy_nats` is the entropy of the distribution of single tokens: the loss of a model
    that knows how often each token occurs and nothing else.
    """

    tokenizer: dict[str, Any]
    decode_errors: str
    append_eod: bool
    dtype: str
    documents: int
    empty_documents: int
    tokens: int
    max_token_id: int
    unigram_entropy_nats: float
    source: Source
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """Returns the text of the file."""
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"


def manifest_path(prefix: str) -> Path:
    """Returns where the manifest of a data set lies."""
    return Path(f"{prefix}.json")


def read_manifest(prefix: str) -> Manifest | None:
    """Returns the manifest of a data set, or None where there is none (data made elsewhere).

    Raises:
        UserError: the file is damaged, or of another version.
    """
    path = manifest_path(prefix)
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text("utf-8"))
        if content["format_version"] != FORMAT_VERSION:
            raise UserError(
                f"{path}: version {content['format_version']}, this program reads version "
                f"{FORMAT_VERSION}; prepare the data again"
            )
        return Manifest(**{**content, "source": Source(**content["source"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: not a manifest of `moevement data prepare` ({error}); prepare the data again"
        ) from error
