# SPDX-License-Identifier: Apache-2.0
"""The patch series as it lies on disk: which release it applies to, and the patches in order.

Owns the format of `UPSTREAM`, of `series` and of the header that every patch carries.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from megatron_moevement.errors import UserError

SERIES_NAME = "core_v0.16.1"
HEADER_KEYS = ("Why", "Upstream", "Drop when", "Test")


@dataclass(frozen=True)
class Upstream:
    """The release that the series applies to."""

    repository: str
    tag: str
    commit: str
    distribution: str
    version: str
    fork_version: int
    wheel_sha256: dict[str, str]
    """Digests of the release's wheels that have been looked at, by file name."""

    @property
    def local_version(self) -> str:
        """Version of the patched distribution, e.g. `0.16.1+moevement.1`."""
        return f"{self.version}+moevement.{self.fork_version}"


@dataclass(frozen=True)
class FileChange:
    """One file that a patch touches, with the git blob ids before and after (None: no file)."""

    path: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Patch:
    """One patch in `git format-patch` form."""

    path: Path
    header: str
    diff: str

    @property
    def name(self) -> str:
        """File name, which is also the patch's name in the series."""
        return self.path.name

    @property
    def digest(self) -> str:
        """SHA-256 of the diff alone: rewording the header does not make a fork stale."""
        return hashlib.sha256(self.diff.encode()).hexdigest()

    @property
    def test(self) -> str:
        """Node id of the test that fails without this patch."""
        return header_fields(self.header)["Test"]

    @property
    def changes(self) -> tuple[FileChange, ...]:
        """The touched files, from the `index` lines.

        Raises:
            UserError: The diff does not carry full blob ids for each file.
        """
        return tuple(_changes(self.name, self.diff))


@dataclass(frozen=True)
class Series:
    """A release and the patches to apply to it, in order."""

    upstream: Upstream
    patches: tuple[Patch, ...]


def series_directory() -> Path:
    """Returns the directory of the series: inside the installed package, or in the checkout."""
    here = Path(__file__).resolve().parent
    candidates = (here / "patches" / SERIES_NAME, here.parents[3] / "patches" / SERIES_NAME)
    for candidate in candidates:
        if (candidate / "UPSTREAM").is_file():
            return candidate
    raise UserError(f"no patch series at {candidates[0]} or {candidates[1]}: reinstall the package")


def load_series(directory: Path | None = None) -> Series:
    """Reads a series.

    Args:
        directory: Where `UPSTREAM`, `series` and the patches are; default: this package's.

    Raises:
        UserError: A file is missing or malformed; the message names it.
    """
    directory = directory or series_directory()
    names = [
        line.strip()
        for line in _read(directory / "series").splitlines()
        if line.strip() and not line.startswith("#")
    ]
    patches = tuple(_parse_patch(directory / name) for name in names)
    unlisted = sorted({path.name for path in directory.glob("*.patch")} - set(names))
    if unlisted:
        raise UserError(f"{directory}: {unlisted[0]} is not listed in the file `series`")
    return Series(_parse_upstream(directory / "UPSTREAM"), patches)


def header_fields(header: str) -> dict[str, str]:
    """Returns the `Key: value` fields of a patch header; an indented line continues a value."""
    fields: dict[str, str] = {}
    key = None
    for line in header.splitlines():
        name, colon, value = line.partition(":")
        if colon and name in HEADER_KEYS:
            key, fields[name] = name, value.strip()
        elif key and line.startswith(" "):
            fields[key] = f"{fields[key]} {line.strip()}"
        else:
            key = None
    return fields


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _parse_upstream(path: Path) -> Upstream:
    fields: dict[str, str] = {}
    digests: dict[str, str] = {}
    for line in _read(path).splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        key, _, value = line.partition(":")
        if key == "sha256":
            digest, _, wheel = value.strip().partition(" ")
            digests[wheel.strip()] = digest
        else:
            fields[key] = value.strip()
    try:
        return Upstream(
            repository=fields["repository"],
            tag=fields["tag"],
            commit=fields["commit"],
            distribution=fields["distribution"],
            version=fields["version"],
            fork_version=int(fields["fork-version"]),
            wheel_sha256=digests,
        )
    except (KeyError, ValueError) as error:
        raise UserError(f"{path}: missing or malformed field {error}") from error


def _parse_patch(path: Path) -> Patch:
    text = _read(path)
    header, marker, rest = text.partition("\ndiff --git ")
    if not marker:
        raise UserError(f"{path}: holds no diff")
    missing = [key for key in HEADER_KEYS if key not in header_fields(header)]
    if missing:
        raise UserError(f"{path}: the header has no `{missing[0]}:` line")
    return Patch(path, header + "\n", f"diff --git {rest}")


def _changes(name: str, diff: str) -> list[FileChange]:
    changes: list[FileChange] = []
    path = None
    for line in diff.splitlines():
        if line.startswith("diff --git a/"):
            path = line.rpartition(" b/")[2]
        elif line.startswith("index ") and path is not None:
            before, _, after = line.split()[1].partition("..")
            if len(before) != 40 or len(after) != 40:
                raise UserError(f"{name}: {path} has short blob ids: export it with `fork export`")
            changes.append(FileChange(path, _blob(before), _blob(after)))
            path = None
    if path is not None or not changes:
        raise UserError(f"{name}: {path or 'the diff'} has no index line; renames are not allowed")
    return changes


def _blob(identifier: str) -> str | None:
    return identifier if identifier.strip("0") else None
