# SPDX-License-Identifier: Apache-2.0
"""The marker module that the series adds to Megatron-Core, and the start-up check that reads it.

The marker names the other patches of the series with the digests of their diffs, so that a fork
built from older patches is told apart from the current one. It is read as text: the check runs
before Megatron-Core may be imported.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.fork.series import Patch, Series, load_series
from megatron_moevement.integrations.megatron.fork.tree import blob_id

MARKER_PATH = "megatron/core/moevement.py"
INSTALL_COMMAND = "python -m megatron_moevement.integrations.megatron.fork install"


@dataclass(frozen=True)
class Marker:
    """What the marker module says: the fork's version and each patch's name and digest."""

    fork_version: int
    patches: tuple[tuple[str, str], ...]


def check_fork(search_path: Sequence[str] | None = None) -> Marker:
    """Checks that the importable Megatron-Core carries this package's patch series.

    An own checkout to which the series was applied with `git am` counts as well as the wheel.

    Args:
        search_path: Directories that hold `megatron`; default: those that `import` would use.

    Raises:
        UserError: It is missing, unpatched, or carries another series.
    """
    root = megatron_root(search_path)
    if root is None:
        raise UserError(f"Megatron-Core is not installed: run `{INSTALL_COMMAND}`")
    file = root / MARKER_PATH
    if not file.is_file():
        raise UserError(
            f"Megatron-Core at {root} lacks the MoEvement patches: run `{INSTALL_COMMAND}`"
        )
    found = read_marker(file)
    expected = series_marker(load_series())
    if found != expected:
        raise UserError(
            f"Megatron-Core at {root} carries other MoEvement patches than this package"
            f" ({_difference(found, expected)}): run `{INSTALL_COMMAND}`"
        )
    return found


def series_marker(series: Series) -> Marker:
    """Returns what the marker must say for a series whose first patch adds the marker."""
    patches = tuple((patch.name, patch.digest) for patch in series.patches[1:])
    return Marker(series.upstream.fork_version, patches)


def read_marker(file: Path) -> Marker:
    """Reads a marker module without importing it.

    Raises:
        UserError: The file is not a marker module.
    """
    values: dict[str, object] = {}
    try:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                values[node.targets[0].id] = ast.literal_eval(node.value)
        version, patches = values["FORK_VERSION"], values["PATCHES"]
        if not isinstance(version, int) or not isinstance(patches, dict):
            raise TypeError("wrong types")
    except (KeyError, SyntaxError, TypeError, ValueError) as error:
        raise UserError(f"{file} is damaged ({error}): run `{INSTALL_COMMAND}`") from error
    return Marker(version, tuple(patches.items()))


def marker_source(marker: Marker) -> str:
    """Returns the text of the marker module."""
    rows = "".join(f'    "{name}":\n        "{digest}",\n' for name, digest in marker.patches)
    return (
        '"""Marks a Megatron-Core that carries the MoEvement patches.\n'
        "\n"
        "PATCHES gives the SHA-256 of each further patch's diff, in the order of the series.\n"
        '"""\n'
        "\n"
        f"FORK_VERSION = {marker.fork_version}\n"
        f"PATCHES = {{\n{rows}}}\n"
    )


def marker_patch(header: str, marker: Marker) -> str:
    """Returns the first patch of a series, which adds the marker module.

    Args:
        header: The patch's text above the diff, ending in a newline.
    """
    source = marker_source(marker)
    added = "".join(f"+{line}\n" for line in source.splitlines())
    return (
        f"{header}diff --git a/{MARKER_PATH} b/{MARKER_PATH}\n"
        "new file mode 100644\n"
        f"index {'0' * 40}..{blob_id(source.encode())}\n"
        "--- /dev/null\n"
        f"+++ b/{MARKER_PATH}\n"
        f"@@ -0,0 +1,{len(source.splitlines())} @@\n"
        f"{added}"
    )


def is_marker_patch(patch: Patch) -> bool:
    """Tells whether a patch adds the marker module and nothing else."""
    return [change.path for change in patch.changes] == [MARKER_PATH]


def megatron_root(search_path: Sequence[str] | None = None) -> Path | None:
    """Returns the folder that holds the importable `megatron`, None without Megatron-Core."""
    if search_path is None:
        spec = importlib.util.find_spec("megatron")
        portions = list(spec.submodule_search_locations or ()) if spec else []
    else:
        portions = [str(Path(entry) / "megatron") for entry in search_path]
    for portion in portions:
        if (Path(portion) / "core" / "__init__.py").is_file():
            return Path(portion).parent
    return None


def _difference(found: Marker, expected: Marker) -> str:
    missing = [name for name, _ in expected.patches if name not in dict(found.patches)]
    if missing:
        return f"it lacks {missing[0]}"
    extra = [name for name, _ in found.patches if name not in dict(expected.patches)]
    if extra:
        return f"it has {extra[0]}"
    changed = [name for (name, digest) in expected.patches if dict(found.patches)[name] != digest]
    if changed:
        return f"another form of {changed[0]}"
    return f"version {found.fork_version}, not {expected.fork_version}, or another order"
