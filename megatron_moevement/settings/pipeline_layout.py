# SPDX-License-Identifier: Apache-2.0
"""`--pipeline-model-parallel-layout`: which layers each stage and chunk of a pipeline has.

Source: `PipelineParallelLayerLayout` of Megatron-Core, which checks it again; it is read here, too,
since it decides how many chunks a stage has.
"""

from __future__ import annotations

import re

from megatron_moevement.errors import UserError

_REPETITIONS = (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)")
_KNOWN = frozenset("Etm|L")


def parts_of(layout: str) -> tuple[str, ...]:
    """Returns the parts of a pipeline in the order in which a micro-batch passes them.

    A part is one letter for each module: E embedding, t layer, m multi-token prediction, L loss.

    Raises:
        UserError: it is no layout, or one with multi-token prediction.
    """
    text = layout.replace(",", "")
    for pattern in _REPETITIONS:
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    option = f"--pipeline-model-parallel-layout {layout}"
    if not set(text) <= _KNOWN:
        raise UserError(f"{option}: give E, t, L and |, such as Et*3|(tt|)*2tL")
    if "m" in text:
        raise UserError(f"{option}: multi-token prediction is not covered")
    return tuple(text.split("|"))


def check_layout(layout: str, stages: int, layers: int) -> None:
    """Checks that a layout is one of so many stages and layers.

    Raises:
        UserError: it is not.
    """
    option = f"--pipeline-model-parallel-layout {layout}"
    parts = parts_of(layout)
    modules = "".join(parts)
    if len(parts) % stages:
        raise UserError(
            f"{option} has {len(parts)} parts, no multiple of --pipeline-model-parallel-size "
            f"{stages}"
        )
    if modules != f"E{'t' * layers}L":
        raise UserError(f"{option}: give E, then --num-layers {layers} times t, then L")
    if not all(parts):
        raise UserError(f"{option} leaves a part empty; give each at least one of E, t and L")
