# SPDX-License-Identifier: Apache-2.0
"""Every flag is sorted: it decides bits or not, and a new one can't be forgotten."""

import dataclasses

import pytest

from megatron_moevement.training.arguments import Arguments
from megatron_moevement.training.data.arguments import DataFlags
from megatron_moevement.training.deciding import DECIDING


@pytest.mark.parametrize("group", DECIDING, ids=lambda group: group.__name__)
def test_every_field_is_in_one_list(group):
    assert sorted(DECIDING[group].all) == sorted(field.name for field in dataclasses.fields(group))


def test_every_group_of_the_command_line_is_sorted():
    fields = {field.type for field in dataclasses.fields(Arguments)} - {
        "int",
        "DataConfig",
        "tuple[str, ...]",
    }
    assert fields | {DataFlags.__name__} == {group.__name__ for group in DECIDING}
