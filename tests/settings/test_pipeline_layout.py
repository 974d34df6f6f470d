# SPDX-License-Identifier: Apache-2.0
"""A layout of a pipeline is read as Megatron-Core reads it."""

import pytest
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_moevement.errors import UserError
from megatron_moevement.settings.pipeline_layout import check_layout, parts_of

LETTERS = {"embedding": "E", "decoder": "t", "loss": "L"}


@pytest.mark.parametrize(
    ("layout", "stages"),
    [("Et*3|(tt|)*2tL", 2), ("Et|t|t|tL", 2), ("E|(t|)*6L", 4), ("Ett,|,tL", 2), ("Et*2|L", 2)],
)
def test_a_layout_has_the_parts_that_megatron_core_makes_of_it(layout, stages):
    upstream = PipelineParallelLayerLayout.from_str(layout, stages)
    chunks = range(upstream.virtual_pipeline_model_parallel_size)
    found = [
        "".join(LETTERS[module.name] for module in upstream.layout[stage][chunk])
        for chunk in chunks
        for stage in range(stages)
    ]
    assert list(parts_of(layout)) == found
    check_layout(layout, stages, "".join(found).count("t"))


@pytest.mark.parametrize("layout", ["", "tEL", "Et|L|", "Et||tL", "EttL|x", "Ett|mL"])
def test_what_is_no_layout_of_two_layers_is_refused(layout):
    with pytest.raises(UserError, match="--pipeline-model-parallel-layout"):
        check_layout(layout, 2, 2)
