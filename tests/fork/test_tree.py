# SPDX-License-Identifier: Apache-2.0
"""The series on the pristine release: exactly, or not at all."""

import ast
import dataclasses
import re
import subprocess

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.fork.tree import apply_patch, apply_series, blob_id


def contents(tree):
    return {
        path.relative_to(tree).as_posix(): path.read_bytes()
        for path in tree.rglob("*")
        if path.is_file()
    }


def test_the_series_applies_and_every_touched_file_parses(series, tree):
    apply_series(tree, series.patches)
    for patch in series.patches:
        for change in patch.changes:
            if change.path.endswith(".py") and change.after is not None:
                ast.parse((tree / change.path).read_text())


def test_the_series_touches_only_the_files_that_its_patches_name(series, tree):
    before = contents(tree)
    apply_series(tree, series.patches)
    after = contents(tree)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed == {change.path for patch in series.patches for change in patch.changes}


def test_the_series_reverses_to_the_pristine_release_byte_for_byte(series, tree):
    before = contents(tree)
    apply_series(tree, series.patches)
    assert contents(tree) != before
    for patch in reversed(series.patches):
        command = ["git", "apply", "--reverse", "-"]
        subprocess.run(command, cwd=tree, input=patch.diff, text=True, check=True)
    assert contents(tree) == before


def test_an_offset_is_refused_and_the_file_left_alone(series, tree):
    patch = series.patches[1]
    file = tree / patch.changes[0].path
    shifted = b"# one line more\n" + file.read_bytes()
    file.write_bytes(shifted)
    diff = tree.parent / "patch"
    diff.write_text(patch.diff)
    subprocess.run(["git", "apply", "--check", diff], cwd=tree, check=True)  # git would take it
    with pytest.raises(UserError, match=f"{patch.name} does not apply: {patch.changes[0].path}"):
        apply_patch(tree, patch)
    assert file.read_bytes() == shifted


def test_a_hunk_that_lands_on_another_line_than_it_says_is_refused(series, tree):
    patch = series.patches[1]
    moved = re.sub(r"(?<=[-+])\d+(?=,\d+ )", lambda line: str(int(line[0]) - 5), patch.diff)
    assert moved != patch.diff
    with pytest.raises(UserError, match=r"offset 5 lines"):
        apply_patch(tree, dataclasses.replace(patch, diff=moved))


def test_a_result_that_is_not_the_one_the_patch_names_is_refused(series, tree):
    patch = series.patches[1]
    wrong = patch.diff.replace(f"..{patch.changes[0].after}", f"..{'1' * 40}")
    assert wrong != patch.diff
    with pytest.raises(UserError, match="was applied inexactly"):
        apply_patch(tree, dataclasses.replace(patch, diff=wrong))


def test_a_tree_inside_another_repository_is_patched_and_not_skipped(series, tree):
    subprocess.run(["git", "init", "--quiet", tree.parent], check=True)
    apply_series(tree, series.patches)
    change = series.patches[0].changes[0]
    assert blob_id((tree / change.path).read_bytes()) == change.after


def test_a_patch_that_is_applied_already_is_refused(series, tree):
    apply_series(tree, series.patches)
    with pytest.raises(UserError, match="no such file, but is blob"):
        apply_patch(tree, series.patches[0])


def test_git_ids_are_those_of_git(tmp_path):
    (tmp_path / "file").write_bytes(b"a\nb")
    command = ["git", "hash-object", tmp_path / "file"]
    expected = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    assert blob_id(b"a\nb") == expected
