# SPDX-License-Identifier: Apache-2.0
"""Fetches the release's wheel and repacks a patched tree as a wheel with a correct RECORD."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.fork.series import Series, Upstream
from megatron_moevement.integrations.megatron.fork.tree import apply_series

FIXED_TIME = (1980, 1, 1, 0, 0, 0)
FILE_MODE = 0o100644


def fetch_release(upstream: Upstream, cache: Path) -> Path:
    """Returns the release's wheel for the running interpreter, downloading it once with pip.

    Args:
        cache: Directory that keeps the wheel of each kind of interpreter.

    Raises:
        UserError: pip cannot get it, or its SHA-256 is not the pinned one.
    """
    slot = cache / f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
    pattern = f"{_wheel_stem(upstream.distribution, upstream.version)}-*.whl"
    kept = sorted(slot.glob(pattern))
    if not kept:
        slot.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=slot) as scratch:
            _pip_download(f"{upstream.distribution}=={upstream.version}", Path(scratch))
            (fetched,) = Path(scratch).glob(pattern)
            kept = [slot / fetched.name]
            os.replace(fetched, kept[0])
    _check_digest(kept[0], upstream)
    return kept[0]


def build_fork(series: Series, release: Path, out: Path) -> Path:
    """Applies the series to a release's wheel and writes the fork's wheel.

    Returns:
        Path of the wheel; the same inputs give the same bytes.

    Raises:
        UserError: A patch does not apply exactly.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        tree = Path(scratch) / "tree"
        modes = unpack(release, tree)
        apply_series(tree, series.patches)
        _rename_metadata(tree, series.upstream)
        old = _wheel_stem(series.upstream.distribution, series.upstream.version)
        new = _wheel_stem(series.upstream.distribution, series.upstream.local_version)
        modes = {
            name.replace(f"{old}.dist-info/", f"{new}.dist-info/"): modes[name] for name in modes
        }
        wheel = Path(scratch) / release.name.replace(old, new, 1)
        _pack(tree, f"{new}.dist-info", modes, wheel)
        verify_record(wheel)
        os.replace(wheel, out / wheel.name)
        return out / wheel.name


def unpack(wheel: Path, tree: Path) -> dict[str, int]:
    """Unpacks a wheel into a new directory and returns the mode of each file by its name."""
    modes: dict[str, int] = {}
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tree)
        for info in archive.infolist():
            if not info.is_dir():
                modes[info.filename] = info.external_attr >> 16
    return modes


def verify_record(wheel: Path) -> None:
    """Checks that RECORD lists every file of a wheel with its digest and size, and nothing else.

    Raises:
        UserError: It does not.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = {info.filename for info in archive.infolist() if not info.is_dir()}
        (record,) = [name for name in names if name.endswith(".dist-info/RECORD")]
        rows = list(csv.reader(io.StringIO(archive.read(record).decode())))
        listed = {row[0] for row in rows}
        if listed != names or len(rows) != len(names):
            raise UserError(f"{wheel.name}: RECORD and contents differ: {sorted(listed ^ names)}")
        for name, digest, size in rows:
            expected = ("", "") if name == record else _record_entry(archive.read(name))
            if (digest, size) != expected:
                raise UserError(f"{wheel.name}: RECORD is wrong about {name}")


def _wheel_stem(distribution: str, version: str) -> str:
    return f"{distribution.replace('-', '_')}-{version}"


def _pip_download(requirement: str, directory: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(directory), requirement]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        reason = (lines or result.stderr.splitlines() or ["no reason given"])[-1]
        raise UserError(f"pip could not download {requirement} for {sys.executable}: {reason}")


def _check_digest(wheel: Path, upstream: Upstream) -> None:
    expected = upstream.wheel_sha256.get(wheel.name)
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if expected is not None and found != expected:
        raise UserError(f"{wheel} has SHA-256 {found}, not the pinned {expected}: delete it")


def _rename_metadata(tree: Path, upstream: Upstream) -> None:
    old = tree / f"{_wheel_stem(upstream.distribution, upstream.version)}.dist-info"
    new = tree / f"{_wheel_stem(upstream.distribution, upstream.local_version)}.dist-info"
    old.rename(new)
    metadata = new / "METADATA"
    before = f"\nVersion: {upstream.version}\n".encode()
    content = metadata.read_bytes()
    if content.count(before) != 1:
        raise UserError(f"{old.name}/METADATA has no line `Version: {upstream.version}`")
    after = f"\nVersion: {upstream.local_version}\n".encode()
    metadata.write_bytes(content.replace(before, after))


def _pack(tree: Path, dist_info: str, modes: dict[str, int], wheel: Path) -> None:
    names = sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file())
    record = f"{dist_info}/RECORD"
    names.remove(record)
    names.sort(key=lambda name: (name.startswith(f"{dist_info}/"), name))
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            content = (tree / name).read_bytes()
            writer.writerow((name, *_record_entry(content)))
            archive.writestr(_entry(name, modes.get(name, FILE_MODE)), content)
        writer.writerow((record, "", ""))
        archive.writestr(_entry(record, FILE_MODE), rows.getvalue())


def _entry(name: str, mode: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, FIXED_TIME)
    info.compress_type = zipfile.ZIP_DEFLATED
    info.create_system = 3  # the modes below are Unix's
    info.external_attr = mode << 16
    return info


def _record_entry(content: bytes) -> tuple[str, str]:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}", str(len(content))
