# SPDX-License-Identifier: Apache-2.0
"""How protected a job is, decided from copies, spares and the pipeline's shape."""

import dataclasses

import pytest

from megatron_moevement.policy.copies.protection_level import (
    JobShape,
    ProtectionLevel,
    protection_of,
    tied_ends,
)
from megatron_moevement.policy.job.segments import Ends

SHAPE = JobShape(stages=4, ends=Ends.INDEPENDENT, wanted=2, domains=6, spares=1)


@pytest.mark.parametrize(
    ("copies", "wanted", "level"),
    [
        (0, 2, ProtectionLevel.NO_COPIES),
        (1, 2, ProtectionLevel.REDUCED),
        (2, 2, ProtectionLevel.FULL),
        (3, 2, ProtectionLevel.FULL),
        (0, 0, ProtectionLevel.NO_COPIES),
    ],
)
def test_the_level_is_that_of_the_slot_with_the_fewest_copies(copies, wanted, level):
    assert protection_of(dataclasses.replace(SHAPE, wanted=wanted), copies).level is level


def test_where_a_loss_costs_its_stage_alone_nothing_more_is_told():
    found = protection_of(SHAPE, 2)
    assert found.costs == ()
    assert found.line == "protection: full, 2 copies of 2, 1 spare left"


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ({"stages": 1}, "all ranks replay"),
        ({"stages": 2, "ends": Ends.TIED}, "both stages replay"),
        ({"ends": Ends.TIED}, "the first or the last stage has both replay"),
        ({"spares": 0}, "exit code 75"),
        ({"spares": None}, "ends the job until it is launched again"),
        ({"domains": 2}, "2 failure domains have no room for 2 copies"),
    ],
)
def test_what_a_loss_costs_beyond_its_stage_is_told(shape, told):
    (cost,) = protection_of(dataclasses.replace(SHAPE, **shape), 2).costs
    assert told in cost


def test_without_copies_a_loss_goes_back_to_the_durable_checkpoint():
    alone = dataclasses.replace(SHAPE, domains=1)
    (cost,) = protection_of(alone, 0).costs
    assert "goes back to the durable checkpoint" in cost
    assert "one failure domain" in cost


def test_tied_embeddings_cost_nothing_without_a_pipeline_or_apart():
    assert tied_ends(1, Ends.TIED) == tied_ends(3, Ends.INDEPENDENT) == ""
    assert "--untie-embeddings-and-output-weights" in tied_ends(2, Ends.TIED)
