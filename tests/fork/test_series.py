# SPDX-License-Identifier: Apache-2.0
"""The files of a series, and what is refused in them."""

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.fork.series import header_fields, load_series


def edit(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def test_every_patch_says_why_and_names_a_test_that_exists(series, request):
    for patch in series.patches:
        assert all(header_fields(patch.header).values())
        file, _, name = patch.test.partition("::")
        assert f"def {name}(" in (request.config.rootpath / file).read_text()


def test_patches_are_numbered_in_the_order_of_the_series(series):
    numbers = [patch.name[:4] for patch in series.patches]
    assert numbers == [f"{number:04}" for number in range(1, len(numbers) + 1)]


def test_a_header_field_may_go_on_in_indented_lines():
    fields = header_fields("Subject: x\n\nWhy: one\n two\nUpstream: none\nother text\n lost\n")
    assert fields == {"Why": "one two", "Upstream": "none"}


def test_a_patch_without_a_reason_is_refused(series_copy):
    patch = sorted(series_copy.glob("*.patch"))[1]
    edit(patch, "Drop when:", "Sometime:")
    with pytest.raises(UserError, match="no `Drop when:` line"):
        load_series(series_copy)


def test_a_patch_that_the_series_does_not_list_is_refused(series_copy):
    last = (series_copy / "series").read_text().splitlines()[-1]
    edit(series_copy / "series", f"{last}\n", "")
    with pytest.raises(UserError, match=f"{last} is not listed"):
        load_series(series_copy)


def test_a_listed_patch_that_is_missing_is_refused(series_copy):
    sorted(series_copy.glob("*.patch"))[-1].unlink()
    with pytest.raises(UserError, match="cannot read"):
        load_series(series_copy)


def test_an_upstream_file_without_a_field_is_refused(series_copy):
    edit(series_copy / "UPSTREAM", "fork-version:", "forked:")
    with pytest.raises(UserError, match="fork-version"):
        load_series(series_copy)


def test_short_blob_ids_are_refused(series_copy):
    patch = sorted(series_copy.glob("*.patch"))[1]
    lines = patch.read_text().splitlines(keepends=True)
    index = next(number for number, line in enumerate(lines) if line.startswith("index "))
    lines[index] = "index 61c7f8d..90fc762 100644\n"
    patch.write_text("".join(lines))
    with pytest.raises(UserError, match="short blob ids"):
        _ = load_series(series_copy).patches[1].changes


def test_the_constraints_pin_this_version_of_the_fork(series, request):
    pins = (request.config.rootpath / "constraints.txt").read_text().splitlines()
    assert f"megatron-core=={series.upstream.local_version}" in pins
