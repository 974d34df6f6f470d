# SPDX-License-Identifier: Apache-2.0
"""What the patch of `megatron/core/distributed/finalize_model_grads.py` is for."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state

finalizing = importlib.import_module("megatron.core.distributed.finalize_model_grads")


class Router(torch.nn.Module):
    """The buffers of a router that finalizing reads."""

    def __init__(self):
        super().__init__()
        self.register_buffer("expert_bias", torch.zeros(2))
        self.register_buffer("local_tokens_per_expert", torch.tensor([3.0, 1.0]))


@pytest.fixture
def config(monkeypatch):
    """A config of one rank alone, whose token counts are the job's."""
    monkeypatch.setattr(parallel_state, "get_tensor_and_data_parallel_group", lambda **_: None)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    return SimpleNamespace(moe_router_bias_update_rate=0.5)


def update(model, config):
    finalizing._update_router_expert_bias([model], config)


def test_the_loop_receives_the_expert_bias_instead_of_the_buffer(config):
    received = []
    config.router_expert_bias_func = lambda biases, updated: received.append((biases, updated))
    router = Router()
    update(router, config)
    ((biases, updated),) = received
    assert biases[0] is router.expert_bias
    assert updated.tolist() == [[-0.5, 0.5]]
    assert router.expert_bias.tolist() == [0.0, 0.0]


def test_without_a_loop_that_asks_the_buffer_is_updated_as_upstream_does(config):
    router = Router()
    update(router, config)
    assert router.expert_bias.tolist() == [-0.5, 0.5]
