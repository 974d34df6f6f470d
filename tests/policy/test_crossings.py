# SPDX-License-Identifier: Apache-2.0
"""What one stage sends is what its neighbour receives, in the same order, and each has one name."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.job.boundary import Direction
from megatron_moevement.policy.job.crossings import Crossings


@st.composite
def pipelines(draw):
    pp, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    group = draw(st.integers(1, 4))
    micro_batches = draw(st.integers(1, 9))
    passes = [
        (number, chunk)
        for first in range(0, micro_batches, group)
        for chunk in range(chunks)
        for number in range(first, min(first + group, micro_batches))
    ]
    return Crossings(pp, chunks, passes), micro_batches


@given(pipelines(), st.integers(1, 9))
def test_each_boundary_is_crossed_once_by_each_micro_batch_in_each_direction(drawn, step):
    crossings, micro_batches = drawn
    parts = crossings.pp * crossings.chunks
    for direction, by in ((Direction.FORWARD, 1), (Direction.BACKWARD, -1)):
        sent = [
            tag for stage in range(crossings.pp) for tag in crossings.sent(step, stage, direction)
        ]
        expected = {
            (part, part + by, number)
            for part in range(parts)
            for number in range(micro_batches)
            if 0 <= part + by < parts
        }
        assert len(sent) == len(expected)
        assert {(tag.sender, tag.receiver, tag.micro_batch) for tag in sent} == expected
        assert {(tag.step, tag.direction) for tag in sent} <= {(step, direction)}


@given(pipelines())
def test_a_stage_receives_what_its_neighbour_sends_in_the_order_of_sending(drawn):
    crossings, _ = drawn
    for stage in range(crossings.pp):
        for direction, by in ((Direction.FORWARD, 1), (Direction.BACKWARD, -1)):
            neighbour = (stage + by) % crossings.pp
            sent = crossings.sent(1, stage, direction)
            assert sent == crossings.received(1, neighbour, direction)
            assert {tag.sender % crossings.pp for tag in sent} <= {stage}


@given(pipelines())
def test_a_gradient_is_sent_for_each_input_that_came_in(drawn):
    crossings, _ = drawn
    for stage in range(crossings.pp):
        inputs = crossings.received(1, stage, Direction.FORWARD)
        gradients = crossings.sent(1, stage, Direction.BACKWARD)
        assert {(tag.receiver, tag.sender, tag.micro_batch) for tag in inputs} == {
            (tag.sender, tag.receiver, tag.micro_batch) for tag in gradients
        }
