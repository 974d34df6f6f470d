# SPDX-License-Identifier: Apache-2.0
"""Which device a job trains on."""

import pytest
import torch

from megatron_moevement.backends.backend import BackendName, Collectives, choose, load
from megatron_moevement.errors import UserError


def test_the_cpu_is_the_default_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose(None) is BackendName.CPU


def test_cuda_is_the_default_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose(None) is BackendName.CUDA
    assert choose(BackendName.CPU) is BackendName.CPU


def test_asking_for_cuda_without_a_gpu_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="--moevement-backend cpu"):
        choose(BackendName.CUDA)


@pytest.mark.parametrize(
    ("name", "collectives"),
    [(BackendName.CPU, Collectives.GLOO), (BackendName.CUDA, Collectives.NCCL)],
)
def test_each_backend_names_what_carries_collectives(name, collectives):
    backend = load(name)
    assert backend.name is name
    assert backend.collectives is collectives
