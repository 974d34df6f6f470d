# SPDX-License-Identifier: Apache-2.0
"""Who comes new into a generation takes over what the others know of the job."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from megatron_moevement.policy.outcome.futility import Futility
from megatron_moevement.runtime.slots.store_identity import RunIdentity

pytestmark = pytest.mark.distributed

RUN = RunIdentity({"seed": "1", "data": "x" * 9000}, {"window": "3"})
KEYS = [[["all", 1.0], None]]


def share_all(knows, flags, committed):
    """Returns what this rank knows afterwards, as JSON, or why the processes don't go together."""
    from megatron_moevement.errors import UserError  # noqa: PLC0415
    from megatron_moevement.training.knowledge import Known, share  # noqa: PLC0415

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    has_identity, has_keys, futility = knows[rank]
    own = Known(RUN if has_identity else None, KEYS if has_keys else None, Futility(*futility))
    try:
        known = share(own, flags[rank], committed[rank], 4, torch.device("cpu"))
    except UserError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    identity = None if known.identity is None else known.identity.document()
    return [identity, known.keys, dataclasses.astuple(known.futility)]


@pytest.mark.parametrize("builder", [0, 1, 2])
def test_newcomers_take_over_identity_keys_and_counts(megatron_fork_server, builder):
    knows = [[False, False, [-1, 0, 0]]] * 3
    knows[(builder + 1) % 3] = [True, False, [7, 4, 2]]
    knows[builder] = [True, True, [6, 4, 5]]
    result = megatron_fork_server.run(
        share_all, world_size=3, args=[knows, ["f"] * 3, [7, 5, 0]]
    ).check()
    assert list(result.values) == [[RUN.document(), KEYS, [7, 4, 6]]] * 3


def test_where_nobody_knows_the_run_it_is_still_to_be_found(megatron_fork_server):
    knows = [[False, False, [-1, 0, 0]]] * 2
    result = megatron_fork_server.run(
        share_all, world_size=2, args=[knows, ["f"] * 2, [0, 0]]
    ).check()
    assert list(result.values) == [[None, None, [0, 4, 0]]] * 2


def test_survivors_among_themselves_keep_what_they_know(megatron_fork_server):
    knows = [[True, True, [3, 4, 0]]] * 2
    result = megatron_fork_server.run(
        share_all, world_size=2, args=[knows, ["f"] * 2, [3, 4]]
    ).check()
    assert list(result.values) == [[RUN.document(), KEYS, [4, 4, 0]]] * 2


def test_other_flags_are_refused_on_all_ranks(megatron_fork_server):
    knows = [[False, False, [-1, 0, 0]]] * 3
    result = megatron_fork_server.run(
        share_all, world_size=3, args=[knows, ["f", "f", "g"], [0] * 3]
    )
    values = list(result.check().values)
    assert len(set(values)) == 1
    assert "flags that decide bits differ between ranks 0 and 2" in values[0]
