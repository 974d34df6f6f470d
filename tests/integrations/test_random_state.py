# SPDX-License-Identifier: Apache-2.0
"""Every stream of random numbers is captured, restored, and its own."""

import random

import numpy as np
import pytest
import torch

from tests.harness.tiny_job import tiny_job

pytestmark = pytest.mark.distributed

STREAMS = ("python", "numpy", "host", "data-parallel-rng", "model-parallel-rng")
EXPERT_STREAM = "expert-parallel-rng"


def draw(stream):
    """Takes three numbers from one stream."""
    from megatron.core import tensor_parallel  # noqa: PLC0415

    if stream == "python":
        return [random.random() for _ in range(3)]
    if stream == "numpy":
        return np.random.rand(3).tolist()
    if stream == "host":
        return torch.rand(3).tolist()
    with tensor_parallel.get_cuda_rng_tracker().fork(stream):
        return torch.rand(3).tolist()


def replay_each_stream():
    """Returns for each stream what it gave, gave next, and gave after restoring."""
    from megatron_moevement.integrations.megatron.random_state import (  # noqa: PLC0415
        random_state,
        restore_random_state,
    )

    with tiny_job():
        drawn = {}
        for stream in (*STREAMS, EXPERT_STREAM):
            state = random_state()
            first, second = draw(stream), draw(stream)
            for other in (*STREAMS, EXPERT_STREAM):
                draw(other)
            restore_random_state(state)
            drawn[stream] = [first, second, draw(stream), draw(stream)]
            restore_random_state(state)
            drawn[stream].append(draw(stream))
        return drawn


def test_each_stream_continues_where_it_was_captured_as_often_as_asked(megatron_fork_server):
    (drawn,) = megatron_fork_server.run(replay_each_stream, world_size=1).check().values
    assert set(drawn) == {*STREAMS, EXPERT_STREAM}
    for first, second, first_again, second_again, once_more in drawn.values():
        assert first != second
        assert [first_again, second_again, once_more] == [first, second, first]


def capture_is_a_copy():
    from megatron_moevement.integrations.megatron.random_state import random_state  # noqa: PLC0415

    with tiny_job():
        state = random_state()
        kept = {name: one.clone() for name, one in state["tracker"].items()}
        for stream in (*STREAMS, EXPERT_STREAM):
            draw(stream)
        return [torch.equal(state["tracker"][name], one) for name, one in kept.items()]


def test_what_was_captured_does_not_move_on_with_the_stream(megatron_fork_server):
    (equal,) = megatron_fork_server.run(capture_is_a_copy, world_size=1).check().values
    assert equal == [True, True, True]


def digests_of_streams():
    """Returns the digest of all streams, then of them after one more has moved, and restored."""
    from megatron_moevement.integrations.megatron.random_state import (  # noqa: PLC0415
        random_digest,
        random_state,
        restore_random_state,
    )

    with tiny_job():
        state = random_state()
        found = [random_digest(state)]
        for stream in (*STREAMS, EXPERT_STREAM):
            draw(stream)
            found.append(random_digest(random_state()))
        restore_random_state(state)
        return [*found, random_digest(random_state())]


def test_a_digest_stands_for_every_stream(megatron_fork_server):
    (digests,) = megatron_fork_server.run(digests_of_streams, world_size=1).check().values
    assert digests[0] == digests[-1]
    assert len(set(digests)) == len(digests) - 1
    assert all(0 <= digest < 2**63 for digest in digests)


def restore_other_streams(change):
    from megatron_moevement.integrations.megatron.random_state import (  # noqa: PLC0415
        random_state,
        restore_random_state,
    )

    with tiny_job():
        state = random_state()
        draw("python")
        now = random_state()
        expected = draw("python")
        restore_random_state(now)
        streams = state["tracker"]
        if change == "missing":
            del streams[EXPERT_STREAM]
        else:
            streams["stranger"] = streams[EXPERT_STREAM]
        with pytest.raises(KeyError, match="random streams differ") as refused:
            restore_random_state(state)
        assert draw("python") == expected  # no stream went back
        return str(refused.value)


@pytest.mark.parametrize(("change", "name"), [("missing", EXPERT_STREAM), ("more", "stranger")])
def test_streams_of_another_rank_are_refused_by_name(megatron_fork_server, change, name):
    job = megatron_fork_server.run(restore_other_streams, world_size=1, args=[change])
    assert name in job.check().values[0]


def first_numbers(flags):
    with tiny_job(*flags):
        return {stream: draw(stream) for stream in (*STREAMS, EXPERT_STREAM)}


def test_expert_parallel_ranks_share_all_streams_but_that_of_the_experts(megatron_fork_server):
    flags = ["--expert-model-parallel-size=2"]
    one, other = megatron_fork_server.run(first_numbers, world_size=2, args=[flags]).check().values
    assert [name for name in one if one[name] != other[name]] == [EXPERT_STREAM]


def test_pipeline_stages_share_no_stream(megatron_fork_server):
    flags = ["--pipeline-model-parallel-size=2"]
    one, other = megatron_fork_server.run(first_numbers, world_size=2, args=[flags]).check().values
    assert all(one[name] != other[name] for name in one)


def test_equal_states_give_equal_text_whatever_order_sets_have_in_a_process():
    from megatron_moevement.integrations.megatron.random_state import (  # noqa: PLC0415
        encode_random_state,
    )

    stream = torch.zeros(16, dtype=torch.uint8)
    drawn = {"python": random.getstate(), "numpy": np.random.get_state(), "tracker": {}}
    orders = [("host", "device"), ("device", "host")]
    states = [drawn | dict.fromkeys(order, stream) for order in orders]
    assert [list(encode_random_state(state)) for state in states] == [
        ["python", "numpy", "tracker", "device", "host"]
    ] * 2


def restore_streams_of_gpu():
    """Returns what each stream gives before and after a state of another kind of device."""
    from megatron_moevement.integrations.megatron.random_state import (  # noqa: PLC0415
        random_state,
        restore_random_state,
    )

    with tiny_job():
        state = random_state()
        state["device"] = torch.zeros(16, dtype=torch.uint8)
        state["tracker"] = dict.fromkeys(state["tracker"], state["device"])
        first = {stream: draw(stream) for stream in (*STREAMS, EXPERT_STREAM)}
        restore_random_state(state)
        return first, {stream: draw(stream) for stream in (*STREAMS, EXPERT_STREAM)}


def test_streams_of_another_kind_of_device_leave_those_of_this_one(megatron_fork_server):
    (found,) = megatron_fork_server.run(restore_streams_of_gpu, world_size=1).check().values
    first, again = found
    restored = {stream for stream in first if first[stream] == again[stream]}
    assert restored == {"python", "numpy", "host"}
