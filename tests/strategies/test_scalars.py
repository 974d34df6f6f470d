# SPDX-License-Identifier: Apache-2.0
"""Scalars survive their encoding bit for bit: floats, what is no number, random streams."""

import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as draw

pytestmark = pytest.mark.distributed


def bits_of(value):
    return struct.pack(">d", value)


def entries(floats):
    from megatron_moevement.policy.window.ordering import Ordering  # noqa: PLC0415
    from megatron_moevement.policy.window.popularity import Popularity  # noqa: PLC0415
    from megatron_moevement.runtime.coordination.ledger import LedgerEntry, ParameterGroup  # noqa: PLC0415

    for number in floats:
        yield LedgerEntry(
            step=3,
            loss=number,
            consumed_samples=2**53 + 1,
            loss_scale=abs(number),
            found_inf=(True, False),
            grad_norm=None if math.isinf(number) else number,
            clip_factor=1 / 3,
            num_tokens=0,
            groups=(ParameterGroup(number, 0.1), ParameterGroup(1e-300, -0.0)),
            scalers=({"scale": number, "growth_tracker": 7}, None),
            random_state=object(),
            rng_equal=True,
            popularity=Popularity(Ordering.SOFT, (2**40 - 1, 0), (3, 4)),
        )


FLOATS = [0.1, -0.0, 0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan, 2**-149]


def _in_an_older_journal(text):
    """Returns an entry as it is read where the key of journals for the random streams lacks."""
    from megatron_moevement.strategies.scalars import decode_entry  # noqa: PLC0415

    document = json.loads(text)
    assert document.pop("streams_alike") is True
    return decode_entry(json.dumps(document).encode())


def encode_and_decode(texts):
    """Returns for each float whether an entry with it comes back with the same bits."""
    from megatron_moevement.strategies.scalars import (  # noqa: PLC0415
        decode_entry,
        encode_entry,
        same_scalars,
    )

    found = []
    for entry in entries([float(text) for text in texts]):
        back = decode_entry(encode_entry(entry))
        same = same_scalars(entry, back) and back.random_state is None
        same &= back.rng_equal is True
        same &= _in_an_older_journal(encode_entry(entry)).rng_equal is False
        same &= (back.step, back.consumed_samples, back.found_inf, back.num_tokens) == (
            entry.step,
            entry.consumed_samples,
            entry.found_inf,
            entry.num_tokens,
        )
        pairs = [
            (back.loss, entry.loss),
            (back.loss_scale, entry.loss_scale),
            (back.clip_factor, entry.clip_factor),
            (back.scalers[0]["scale"], entry.scalers[0]["scale"]),
            *((one.lr, other.lr) for one, other in zip(back.groups, entry.groups, strict=True)),
            (back.groups[1].weight_decay, entry.groups[1].weight_decay),
        ]
        same &= all(bits_of(one) == bits_of(other) for one, other in pairs)
        same &= back.scalers[1] is None and (back.grad_norm is None) == (entry.grad_norm is None)
        found.append(same)
    return found


def test_a_ledger_entry_comes_back_with_the_same_bits(megatron_fork_server):
    texts = [repr(number) for number in FLOATS]
    job = megatron_fork_server.run(encode_and_decode, world_size=1, args=[texts])
    assert job.check().values == ([True] * len(FLOATS),)


def compare_neighbours():
    """Returns whether entries that differ in one bit of one scalar pass as the same."""
    import dataclasses  # noqa: PLC0415

    from megatron_moevement.strategies.scalars import same_scalars  # noqa: PLC0415

    (entry,) = entries([0.1])
    changes = {
        "loss": math.nextafter(0.1, 1),
        "loss_scale": -0.0,
        "grad_norm": None,
        "found_inf": (False, False),
        "groups": entry.groups[:1],
        "scalers": (None, None),
        "clip_factor": math.nan,
    }
    others = {name: dataclasses.replace(entry, **{name: one}) for name, one in changes.items()}
    assert same_scalars(entry, dataclasses.replace(entry, random_state=None))
    return [name for name, other in others.items() if same_scalars(entry, other)]


def test_entries_that_differ_in_one_bit_are_not_the_same(megatron_fork_server):
    job = megatron_fork_server.run(compare_neighbours, world_size=1)
    assert job.check().values == ([],)


@given(draw.floats(allow_nan=False))
def test_json_gives_back_the_same_float(number):
    assert bits_of(json.loads(json.dumps(number))) == bits_of(number)


def carry_streams():
    """Returns whether slot scalars bring every random stream back, and what else they hold."""
    import random  # noqa: PLC0415

    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from megatron.core import tensor_parallel  # noqa: PLC0415

    from megatron_moevement.integrations.megatron.random_state import (  # noqa: PLC0415
        random_state,
        restore_random_state,
    )
    from megatron_moevement.runtime.coordination.progress import Progress  # noqa: PLC0415
    from megatron_moevement.strategies.scalars import SlotScalars  # noqa: PLC0415
    from tests.harness.tiny_job import tiny_job  # noqa: PLC0415

    def numbers():
        tracker = tensor_parallel.get_cuda_rng_tracker()
        drawn = [random.random(), random.gauss(0, 1), np.random.rand(), torch.rand(3).tolist()]
        for name in sorted(tracker.get_states()):
            with tracker.fork(name):
                drawn.append([name, torch.rand(2).tolist()])
        return drawn

    with tiny_job():
        random.gauss(0, 1)  # which keeps a second number for later
        scaler = {"scale": 0.1, "hysteresis_tracker": 1}
        before = SlotScalars(
            Progress(7, 2**40, 1), 6, (scaler, None), {"num_steps": 12}, random_state()
        )
        text = before.encode()
        first = numbers()
        other = numbers()
        after = SlotScalars.decode(text)
        restore_random_state(dict(after.random_state))
        assert first == numbers() != other
        assert len(first) > 5  # with streams of Megatron's tracker
        assert text == after.encode()
        return [after.progress == before.progress, after.adam_step, after.scalers, after.scheduler]


def test_slot_scalars_bring_every_random_stream_back(megatron_fork_server):
    job = megatron_fork_server.run(carry_streams, world_size=1)
    scaler = {"scale": 0.1, "hysteresis_tracker": 1}
    assert job.check().values == ([True, 6, [scaler, None], {"num_steps": 12}],)
