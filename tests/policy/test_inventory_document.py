# SPDX-License-Identifier: Apache-2.0
"""Inventories as JSON: what is written is read back, what is wrong is said in one line."""

import json

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.policy.job.inventory_document import dump_inventory, load_inventory
from megatron_moevement.policy.job.model_shape import Capture, ModelShape, inventory_of
from megatron_moevement.policy.job.ranks import Layout

SHAPE = ModelShape(2, 4, 8, 16, num_experts=2, moe_ffn_hidden_size=3, tied_embeddings=True)


def test_what_is_written_is_read_back():
    inventory = inventory_of(SHAPE, Layout(pp=2, ep=2), Capture.SHARD)
    text = dump_inventory(inventory)
    again = load_inventory(text, "a.json")
    assert dump_inventory(again) == text
    assert again.tied == inventory.tied
    assert {rank: set(ops) for rank, ops in again.by_rank.items()} == {
        rank: set(ops) for rank, ops in inventory.by_rank.items()
    }


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"ranks": []},
        {"ranks": {}},
        {"ranks": {"rank 0": {}}},
        {"ranks": {"pp0.dp0.tp0.cp0.ep0": {"layers.0.gates": [1, 2]}}},
        {"ranks": {"pp0.dp0.tp0.cp0.ep0": {"layers.0.gate": [1]}}},
        {"ranks": {"pp0.dp0.tp0.cp0.ep0": {"layers.0.gate": [1.5, 2]}}},
        {"ranks": {"pp0.dp0.tp0.cp0.ep0": {"layers.0.gate": [-1, 2]}}},
        {"ranks": {"pp0.dp0.tp0.cp0.ep0": {"head": [1, 2]}}, "tied": [["embedding"]]},
        {"ranks": {"pp0.dp0.tp0.cp0.ep0": {"head": [1, 2]}}, "tied": 3},
    ],
)
def test_what_is_no_inventory_is_refused_in_one_line_that_names_the_file(document):
    with pytest.raises(UserError) as raised:
        load_inventory(json.dumps(document), "a.json")
    assert str(raised.value).startswith("a.json")
    assert "\n" not in str(raised.value)


def test_what_is_no_json_is_refused():
    with pytest.raises(UserError, match=r"a\.json is no inventory"):
        load_inventory("{", "a.json")
