# SPDX-License-Identifier: Apache-2.0
"""What lies in a target: tiers that are whole, by their manifests, and others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TypeVar

from megatron_moevement.policy.tiers.tier import Manifest, PartName, TierName
from megatron_moevement.runtime.slots.mapped_file import checksum_of
from megatron_moevement.runtime.tiers.part import DamagedPartError
from megatron_moevement.runtime.tiers.target import Target

_ENDING = ".manifest"
_CHECKSUM_DIGITS = 16
_MOST_BYTES = 1 << 28

N = TypeVar("N")


def write_manifest(target: Target, manifest: Manifest) -> None:
    """Declares a tier whole; its parts are there.

    Raises:
        Exception: the target refuses.
    """
    text = json.dumps(manifest.document()).encode()
    with target.create(f"{manifest.name}{_ENDING}") as file:
        file.write(f"{checksum_of(text):0{_CHECKSUM_DIGITS}x}".encode() + text)


def read_manifest(target: Target, name: TierName) -> Manifest:
    """Returns the manifest of a tier.

    Raises:
        DamagedPartError: it is not there, or not whole.
        Exception: the target refuses.
    """
    try:
        with target.read(f"{name}{_ENDING}") as file:
            data = file.read(_MOST_BYTES)
        checksum, text = data[:_CHECKSUM_DIGITS], data[_CHECKSUM_DIGITS:]
        if checksum != f"{checksum_of(text):0{_CHECKSUM_DIGITS}x}".encode():
            raise DamagedPartError(f"the manifest of {name} has another checksum")
        manifest = Manifest.of_document(json.loads(text))
    except FileNotFoundError as error:
        raise DamagedPartError(f"the manifest of {name} is missing") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedPartError(f"{name} has no manifest: {error!r}") from error
    if manifest.name != name:
        raise DamagedPartError(f"the manifest of {name} is that of {manifest.name}")
    return manifest


def whole_tiers(target: Target) -> list[TierName]:
    """Returns the tiers that have a manifest, whatever it says."""
    names = (name.removesuffix(_ENDING) for name in target.names() if name.endswith(_ENDING))
    return _parsed(names, TierName.parse)


def begun_tiers(target: Target) -> list[TierName]:
    """Returns the tiers that any rank has begun to write."""
    return _parsed(target.names(), TierName.parse)


def parts_there(target: Target, name: TierName) -> list[PartName]:
    """Returns the parts of a tier that are written."""
    return _parsed(target.names(str(name)), PartName.parse)


def remove_tier(target: Target, name: TierName) -> None:
    """Removes a tier, its manifest first."""
    target.remove(f"{name}{_ENDING}")
    target.remove(str(name))


def _parsed(names: Iterable[str], parse: Callable[[str], N]) -> list[N]:
    """Returns what names say; anything else may lie beside it."""
    found = []
    for name in names:
        try:
            found.append(parse(name))
        except ValueError:
            continue
    return found
