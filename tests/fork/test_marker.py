# SPDX-License-Identifier: Apache-2.0
"""The start-up check: which Megatron-Core counts as the fork, and what is said of the others."""

import dataclasses
import subprocess
import sys

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.fork.checkout import open_checkout
from megatron_moevement.integrations.megatron.fork.marker import (
    INSTALL_COMMAND,
    MARKER_PATH,
    check_fork,
    is_marker_patch,
    marker_patch,
    marker_source,
    read_marker,
    series_marker,
)
from megatron_moevement.integrations.megatron.fork.tree import apply_series


def refusal(tree):
    with pytest.raises(UserError) as caught:
        check_fork([str(tree)])
    assert "\n" not in str(caught.value)
    assert f"run `{INSTALL_COMMAND}`" in str(caught.value)
    return str(caught.value)


def test_the_importable_megatron_carries_this_series(series):
    assert check_fork() == series_marker(series)


def test_the_first_patch_is_the_marker_of_the_others(series):
    first = series.patches[0]
    assert is_marker_patch(first)
    expected = marker_patch(first.header, series_marker(series))
    assert first.header + first.diff == expected, "run `fork export`"


def test_a_patched_tree_counts(series, tree):
    apply_series(tree, series.patches)
    assert check_fork([str(tree)]) == series_marker(series)


def test_an_own_checkout_patched_by_git_am_counts(series, release, tmp_path):
    open_checkout(series, release, tmp_path / "checkout")
    assert check_fork([str(tmp_path / "checkout")]) == series_marker(series)


def test_the_first_directory_with_megatron_core_is_the_one_checked(series, tree, tmp_path):
    (tmp_path / "empty" / "megatron").mkdir(parents=True)
    apply_series(tree, series.patches)
    assert check_fork([str(tmp_path / "empty"), str(tree)]) == series_marker(series)


def test_an_unpatched_megatron_is_refused(tree):
    assert f"Megatron-Core at {tree} lacks the MoEvement patches" in refusal(tree)


def test_no_megatron_is_refused(tmp_path):
    assert "Megatron-Core is not installed" in refusal(tmp_path)


def test_a_megatron_with_other_patches_is_refused_with_the_difference(series, tree):
    apply_series(tree, series.patches)
    marker = series_marker(series)
    name, digest = marker.patches[0]
    for patches, difference in (
        ((), f"it lacks {name}"),
        ((*marker.patches, ("0099-x.patch", digest)), "it has 0099-x.patch"),
        (((name, "0" * 64), *marker.patches[1:]), f"another form of {name}"),
    ):
        changed = dataclasses.replace(marker, patches=patches)
        (tree / MARKER_PATH).write_text(marker_source(changed))
        assert difference in refusal(tree)
    older = dataclasses.replace(marker, fork_version=marker.fork_version + 1)
    (tree / MARKER_PATH).write_text(marker_source(older))
    assert f"version {older.fork_version}, not {marker.fork_version}" in refusal(tree)


@pytest.mark.parametrize(
    "text", ["", "FORK_VERSION = 1\n", "def (", "PATCHES = {}\nFORK_VERSION = f()\n"]
)
def test_a_damaged_marker_is_refused(tree, text):
    (tree / MARKER_PATH).write_text(text)
    assert "is damaged" in refusal(tree)


def test_a_marker_reads_back_as_it_was_written(series, tmp_path):
    marker = series_marker(series)
    (tmp_path / "marker.py").write_text(marker_source(marker))
    assert read_marker(tmp_path / "marker.py") == marker


def test_the_check_command_ends_with_code_2_and_one_line(tree, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tree))
    command = [sys.executable, "-m", "megatron_moevement.integrations.megatron.fork", "check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"fork check: Megatron-Core at {tree} lacks")
