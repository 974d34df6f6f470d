# SPDX-License-Identifier: Apache-2.0
"""Sealed JSON documents in a store of torch: one for a key, or a list of them.

What carries no seal of this job counts as not written: a line says so.
"""

from __future__ import annotations

import functools
import logging
import secrets
from typing import Any, ClassVar

from nvidia_resiliency_ext.inprocess.store import StoreMixin

from megatron_moevement.runtime.coordination.roll_call import first_proposed
from megatron_moevement.runtime.security.seal import BrokenSealError, Seal

logger = logging.getLogger(__name__)

NONCE_BYTES = 8


class SealedDocuments(StoreMixin):  # type: ignore[misc]  # upstream is not typed
    """Writes and reads them; mixed into a store of torch."""

    _seal: Seal
    _scope: str
    """Where the keys lie, so that no value counts in another generation."""
    _complained: ClassVar[set[tuple[str, str]]] = set()

    def _begin(self, seal: Seal, scope: str) -> None:
        self._seal = seal
        self._scope = scope
        self._written: dict[str, str] = {}

    def _put(self, key: str, document: Any) -> None:
        """Writes a document in the place of the one before."""
        self._written[key] = text = self._seal.close(self._place(key), document)
        self.set(key, text)

    def _is_put(self, key: str) -> bool:
        return self._document(key) is not None

    def _document(self, key: str) -> Any:
        """Returns what is written there; None where nothing is."""
        return self._opened(key, self.get(key)) if self.check([key]) else None

    def _first_proposed(self, key: str, proposed: Any) -> Any:
        """Returns what the first process has proposed; None where the store takes nothing of it."""
        sealed = self._seal.close(self._place(key), proposed)
        return first_proposed(self, key, sealed, functools.partial(self._opened, key))

    def _line(self, key: str, document: Any) -> tuple[str, str]:
        """Returns a key, and what adds a document to the list there."""
        signed = [secrets.token_hex(NONCE_BYTES), document]
        return key, f"\n{self._seal.close(self._place(key), signed)}\n"

    def _lines(self, key: str) -> dict[bytes, Any]:
        """Returns the documents of a list by their lines; one that was copied is there once."""
        if not self.check([key]):
            return {}
        lines = dict.fromkeys(line for line in self.get(key).split(b"\n") if line)
        opened = {line: self._opened(key, line) for line in lines}
        return {line: signed[1] for line, signed in opened.items() if signed is not None}

    def _opened(self, key: str, text: bytes) -> Any:
        """Returns the document, None where nobody of this job wrote it: that is said once."""
        try:
            return self._seal.open(self._place(key), text)
        except BrokenSealError as error:
            if (self._scope, key) not in self._complained:
                self._complained.add((self._scope, key))
                logger.warning("%s: %s; it does not count", self._foreign(key), error)
            return None

    def _place(self, key: str) -> str:
        return f"{self._scope}/{key}"

    def _foreign(self, key: str) -> str:
        return f"the control store holds under {key} what no process of this job wrote"
