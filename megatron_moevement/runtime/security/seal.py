# SPDX-License-Identifier: Apache-2.0
"""Seals: a JSON document with a proof of who wrote it, and for which place.

What lies in a store that anybody may reach counts when its seal fits. The proof is an HMAC-SHA256
over the name of the place and the text, so that a document cannot be moved to another place.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

from megatron_moevement.errors import MoEvementError

_PROOF_CHARACTERS = 32
"""128 bits."""
_MAX_BYTES = 2**20


class BrokenSealError(MoEvementError):
    """A text that nobody who has the key wrote for this place."""


class Seal:
    """Seals documents and opens them; any thread may use it."""

    def __init__(self, key: bytes) -> None:
        """Takes a key that only the processes of one job have."""
        self._key = key

    def close(self, place: str, document: Any) -> str:
        """Returns a document, sealed, in one line."""
        text = json.dumps(document)
        return self._proof(place, text) + text

    def open(self, place: str, sealed: bytes) -> Any:
        """Returns the document.

        Raises:
            BrokenSealError: nobody who has the key wrote it for this place.
        """
        if len(sealed) > _MAX_BYTES:
            raise BrokenSealError(f"{len(sealed)} bytes")
        try:
            line = sealed.decode("ascii")
            proof, text = line[:_PROOF_CHARACTERS], line[_PROOF_CHARACTERS:]
            if not hmac.compare_digest(proof, self._proof(place, text)):
                raise BrokenSealError("no seal of this job")
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BrokenSealError("no sealed document") from error

    def _proof(self, place: str, text: str) -> str:
        message = f"{len(place)}:{place};{text}".encode()
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()[:_PROOF_CHARACTERS]
