# SPDX-License-Identifier: Apache-2.0
"""Writing patches: a checkout of the fork, and its export."""

import subprocess

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.fork.checkout import export_series, open_checkout
from megatron_moevement.integrations.megatron.fork.marker import check_fork, series_marker
from megatron_moevement.integrations.megatron.fork.series import load_series
from megatron_moevement.integrations.megatron.fork.wheel import build_fork

MESSAGE = """Say hello

Why: A test.
Upstream: No.
Drop when: The test has ended.
Test: tests/fork/test_checkout.py::test_a_commit_becomes_a_patch
"""


@pytest.fixture
def checkout(series, release, tmp_path):
    open_checkout(series, release, tmp_path / "checkout")
    return tmp_path / "checkout"


def commit(checkout, message):
    file = checkout / "megatron" / "core" / "enums.py"
    file.write_text(file.read_text() + "\nHELLO = 1\n")
    identity = ["-c", "user.name=A", "-c", "user.email=a@localhost"]
    command = ["git", *identity, "commit", "--quiet", "--all", "--message", message]
    subprocess.run(command, cwd=checkout, check=True)


def contents(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_an_unchanged_checkout_exports_the_same_bytes(checkout, series_copy):
    before = contents(series_copy)
    export_series(checkout, series_copy)
    assert contents(series_copy) == before


def test_a_commit_becomes_a_patch(checkout, series, series_copy, release, tmp_path):
    commit(checkout, MESSAGE)
    exported = export_series(checkout, series_copy)
    assert [patch.name for patch in exported.patches[:-1]] == [p.name for p in series.patches]
    assert exported.patches[-1].changes[0].path == "megatron/core/enums.py"
    assert load_series(series_copy) == exported
    open_checkout(exported, release, tmp_path / "second")
    with pytest.raises(UserError, match=f"it has {exported.patches[-1].name}"):
        check_fork([str(tmp_path / "second")])  # this package's series lacks it
    assert series_marker(exported).patches[-1][0] == exported.patches[-1].name
    build_fork(exported, release, tmp_path / "wheel")


def test_a_commit_without_a_reason_is_refused_and_the_series_left_alone(checkout, series_copy):
    before = contents(series_copy)
    commit(checkout, "Say hello")
    with pytest.raises(UserError, match="no `Why:` line"):
        export_series(checkout, series_copy)
    assert contents(series_copy) == before


def test_uncommitted_changes_are_refused(checkout, series_copy):
    (checkout / "megatron" / "core" / "enums.py").write_text("")
    with pytest.raises(UserError, match="uncommitted changes"):
        export_series(checkout, series_copy)


def test_a_directory_that_exists_is_refused(series, release, tmp_path):
    with pytest.raises(UserError, match="exists"):
        open_checkout(series, release, tmp_path)
