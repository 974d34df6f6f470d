# SPDX-License-Identifier: Apache-2.0
"""A process that builds alone makes the parameter groups that all ranks made together."""

import pytest
import torch.distributed as dist

from megatron_moevement.integrations.megatron.group_keys import gathered_keys

DENSE, EXPERT, BIAS = (None, False), (None, True), ((("wd_mult", 0.0),), False)
OWN = [[DENSE, BIAS], [DENSE, EXPERT], [EXPERT, DENSE]]


def groups_of(own):
    """Returns the keys of a rank's parameter groups in their order, as upstream finds them."""
    own = list(own)
    answers = [None] * len(OWN)
    dist.all_gather_object(answers, own)
    for keys in answers:
        for key in keys:
            if key not in own:
                own.append(key)
    return sorted(own, key=lambda key: (key[0] is not None, key[0]))


def build_together():
    """Returns what each rank built, and the keys that it remembers."""
    dist.init_process_group("gloo")
    try:
        with gathered_keys(None) as keys:
            built = groups_of(OWN[dist.get_rank()])
        return [repr(built), keys]
    finally:
        dist.destroy_process_group()


@pytest.mark.distributed
def test_a_rank_that_builds_alone_comes_to_the_groups_of_its_predecessor(fork_server):
    values = fork_server.run(build_together, world_size=len(OWN)).check().values
    for own, (built, keys) in zip(OWN, values, strict=True):
        assert keys == values[0][1]
        assert len(keys) == 1
        assert len(keys[0]) == len({DENSE, EXPERT, BIAS})  # each once, however many ranks have it
        with gathered_keys(keys) as again:
            assert repr(groups_of(own)) == built
        assert again == keys
