# SPDX-License-Identifier: Apache-2.0
"""The secret of a job: made by its launcher for each launch, in the environment of its processes.

It is never on a command line, where any user of the machine sees it, and travels over no network:
what processes send carries proofs that were made with keys derived from it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import os
import secrets

from megatron_moevement.errors import UserError

SECRET_VARIABLE = "MOEVEMENT_SECRET"  # noqa: S105  (the name of a variable)
_MIN_CHARACTERS = 32


@dataclasses.dataclass(frozen=True)
class Secret:
    """What all processes of one launch of a job know, and nobody else.

    Attributes:
        value: random bytes; never shown.
    """

    value: bytes = dataclasses.field(repr=False)

    @classmethod
    def from_environment(cls) -> Secret | None:
        """Reads MOEVEMENT_SECRET; None where the launcher made none.

        Raises:
            UserError: it is too short to be a secret.
        """
        text = os.environ.get(SECRET_VARIABLE, "")
        if not text:
            return None
        if len(text) < _MIN_CHARACTERS:
            raise UserError(
                f"{SECRET_VARIABLE} has {len(text)} characters and needs {_MIN_CHARACTERS}; "
                "let the launcher set it to as many random ones"
            )
        return cls(text.encode())

    def derive(self, *purpose: str) -> bytes:
        """Returns a key for one purpose, from which no other follows.

        Args:
            purpose: names that say what the key is for, and where it is valid.
        """
        text = b"".join(f"{len(name.encode())}:{name};".encode() for name in purpose)
        return hmac.new(self.value, text, hashlib.sha256).digest()


def new_secret() -> str:
    """Returns a value for MOEVEMENT_SECRET."""
    return secrets.token_hex(_MIN_CHARACTERS)
