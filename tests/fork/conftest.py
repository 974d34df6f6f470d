# SPDX-License-Identifier: Apache-2.0
"""The release's wheel and the series, as the tests of the fork use them."""

import shutil
from pathlib import Path

import pytest

from megatron_moevement.integrations.megatron.fork.series import Series, load_series
from megatron_moevement.integrations.megatron.fork.wheel import fetch_release, unpack

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def series() -> Series:
    """This package's series."""
    return load_series()


@pytest.fixture(scope="session")
def release(series) -> Path:
    """The pristine wheel, kept by scripts/setup.sh so that a second run needs no network."""
    return fetch_release(series.upstream, ROOT / "build" / "fork" / "release")


@pytest.fixture(scope="session")
def pristine(release, tmp_path_factory) -> Path:
    """The pristine release, unpacked; tests copy it."""
    folder = tmp_path_factory.mktemp("pristine") / "tree"
    unpack(release, folder)
    return folder


@pytest.fixture
def tree(pristine, tmp_path) -> Path:
    """The pristine release, unpacked; a test may change it."""
    return shutil.copytree(pristine, tmp_path / "tree")


@pytest.fixture
def series_copy(series, tmp_path) -> Path:
    """A copy of the series' directory that a test may change."""
    directory = tmp_path / "series"
    directory.mkdir()
    for file in series.patches[0].path.parent.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    return directory
