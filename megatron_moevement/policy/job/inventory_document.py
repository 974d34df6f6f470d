# SPDX-License-Identifier: Apache-2.0
"""Inventories as JSON: written by a job, planned for by the command.

A document is `{"ranks": {"pp0.dp0.tp0.cp0.ep0": {"layers.0.gate": [full_bytes, compute_bytes],
...}, ...}, "tied": [["embedding", "head"]]}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron_moevement.errors import UserError
from megatron_moevement.policy.job.operators import Inventory, Operator, OperatorId
from megatron_moevement.policy.job.ranks import LogicalRank


def dump_inventory(inventory: Inventory) -> str:
    """Returns an inventory as JSON; the same inventory gives the same text."""
    ranks = {
        str(rank): {
            str(operator.id): [operator.full_bytes, operator.compute_bytes]
            for operator in sorted(inventory.by_rank[rank], key=lambda operator: operator.id)
        }
        for rank in inventory.ranks
    }
    tied = sorted(sorted(map(str, operators)) for operators in inventory.tied)
    return json.dumps({"ranks": ranks, "tied": tied}, indent=1) + "\n"


def load_inventory(text: str, origin: str) -> Inventory:
    """Returns the inventory of a JSON document.

    Args:
        origin: where it comes from, for error messages.

    Raises:
        UserError: the document is no inventory.
    """
    try:
        document = json.loads(text)
        ranks = {
            LogicalRank.parse(rank): _operators(operators)
            for rank, operators in document["ranks"].items()
        }
        tied = tuple(frozenset(map(OperatorId.parse, names)) for names in document.get("tied", []))
        return Inventory(ranks, tied)
    except KeyError as error:
        raise UserError(
            f"{origin}: the inventory has no {error}; see moevement schedule --help"
        ) from error
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"{origin} is no inventory: {error}; see moevement schedule --help"
        ) from error


def _operators(document: Mapping[str, Any]) -> tuple[Operator, ...]:
    operators = []
    for name, sizes in document.items():
        full_bytes, compute_bytes = sizes
        if type(full_bytes) is not int or type(compute_bytes) is not int:
            raise ValueError(f"{name}: {sizes} are no two numbers of bytes")
        operators.append(Operator(OperatorId.parse(name), full_bytes, compute_bytes))
    return tuple(operators)
