# SPDX-License-Identifier: Apache-2.0
"""Whose files they are: a run, the layout of its state, and the version of the format."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from megatron_moevement.errors import MoEvementError, UserError
from megatron_moevement.policy.document import Document

FORMAT_VERSION = 5
"""Raised with every change of a file's layout."""

_RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
RUN_NAME = "run.json"
"""Beside the files of a process: what its run is."""

DEVICE = "device"
TORCH = "torch"
_OF_MACHINES = frozenset({DEVICE, TORCH})
"""What decides bits, and nothing of what the bytes of a slot mean."""
_SHOWN_CHARACTERS = 120
_FINGERPRINT = re.compile(r"[!-~]{1,200}")


class DamagedFileError(MoEvementError):
    """A file of the store does not read as it was written; nothing of it is relied on."""


@dataclasses.dataclass(frozen=True)
class RunIdentity(Document):
    """What a run is: it decides the run's name, and which memory a launch goes on from.

    Attributes:
        deciding: whatever decides a bit of the training, by the names that users know.
        layout: what decides besides what the bytes of a slot mean, and no bit of the training.
    """

    deciding: Mapping[str, str]
    layout: Mapping[str, str]

    @property
    def digest(self) -> str:
        """Digest of what decides bits."""
        return _digest(self.deciding)

    @property
    def fingerprint(self) -> str:
        """Digest of what decides the meaning of a slot's bytes."""
        return _digest({"run": self.digest, **self.layout})

    @property
    def portable_digest(self) -> str:
        """The digest but for the machines: on others the same is computed, to no equal bits."""
        rest = {name: text for name, text in self.deciding.items() if name not in _OF_MACHINES}
        return _digest(rest)

    @property
    def portable_fingerprint(self) -> str:
        """The fingerprint but for the machines: the bytes of a slot mean the same on others."""
        return _digest({"run": self.portable_digest, **self.layout})

    def differences(self, other: RunIdentity) -> list[str]:
        """Returns in what another run differs, as `name value there (here: value)`."""
        found = []
        for name in sorted({*self.deciding, *other.deciding}):
            mine, theirs = self.deciding.get(name, "none"), other.deciding.get(name, "none")
            if mine != theirs:
                short = f"{name} {theirs} (here: {mine})"
                found.append(short if len(short) <= _SHOWN_CHARACTERS else name)
        return found


def _digest(values: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(values), sort_keys=True).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class StoreIdentity(Document):
    """What a file of the store is stamped with; a file with another stamp is never read.

    Attributes:
        run_id: name of the run, the same in every launch of it; it names a folder.
        fingerprint: digest of everything that decides what the bytes of a slot mean.

    Raises:
        UserError: the run's name can't name a folder.
        ValueError: the fingerprint is no short printable text, or the version no positive number.
    """

    run_id: str
    fingerprint: str
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if not _RUN_ID.fullmatch(self.run_id):
            raise UserError(
                f"the run id {self.run_id!r} names a folder of the store: use at most 100 letters, "
                "digits, dots, dashes and underscores, and begin with no dot or dash"
            )
        if not _FINGERPRINT.fullmatch(self.fingerprint):
            raise ValueError(f"no fingerprint: {self.fingerprint!r}")
        if self.format_version < 1:
            raise ValueError(f"no format version: {self.format_version}")

    def check(self, found: StoreIdentity, path: Path) -> None:
        """Refuses the file of another run, of another layout or of another version.

        Raises:
            UserError: the file is foreign.
        """
        differences = [
            f"its {field.name.replace('_', ' ')} is {getattr(found, field.name)}, this job's is "
            f"{getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(found, field.name) != getattr(self, field.name)
        ]
        if differences:
            raise UserError(
                f"{path} was left by another job: {'; '.join(differences)}; give another "
                f"--moevement-store-dir, or remove it with `moevement clean --run-id "
                f"{found.run_id}`"
            )
