# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend: what it asks of its machine, and, with a GPU, that training runs on it."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_moevement.backends.cuda import CudaBackend
from megatron_moevement.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("missing", ["NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG"])
def test_deterministic_mode_names_what_the_environment_lacks(monkeypatch, missing):
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.delenv(missing)
    with pytest.raises(UserError, match=f"{missing}="):
        CudaBackend().use_deterministic_kernels()
    assert not torch.are_deterministic_algorithms_enabled()


def test_deterministic_mode_compiles_nothing(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    compiled = []

    def count(graph, _):
        compiled.append(graph)
        return graph.forward

    before = torch.compile(lambda x: x + 1, backend=count)
    try:
        CudaBackend().use_deterministic_kernels()
        after = torch.compile(lambda x: x + 2, backend=count)
        assert (before(torch.ones(1)) + after(torch.ones(1))).item() == 5
    finally:
        torch.use_deterministic_algorithms(False)
        torch.compiler.set_stance("default")
    assert compiled == []


def test_gpus_of_one_model_differ_by_their_place_on_the_bus_alone(monkeypatch):
    """Whatever number a GPU has among those that a process may see."""
    place = {"pci_domain_id": 0, "pci_bus_id": 0x1B, "pci_device_id": 0}

    def parts(**other):
        gpu = SimpleNamespace(**{"name": "H100", "uuid": "1", **place, **other})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: gpu)
        return CudaBackend().parts()

    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 3))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91200)
    first = parts()
    assert first["GPU of its machine"] == "0:1b:0"
    assert first == parts(uuid="2")
    assert first != parts(pci_bus_id=0x3B)


def test_more_ranks_than_gpus_is_an_error_with_the_number_of_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"LOCAL_RANK 1: this machine has 1 CUDA device"):
        CudaBackend().device(1)


def test_a_generation_computes_on_the_default_stream_whatever_an_interrupt_left(monkeypatch):
    current = {"device": 1, "stream": "a side stream"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda one: current.update(device=one))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: f"default of {current['device']}")
    monkeypatch.setattr(torch.cuda, "set_stream", lambda one: current.update(stream=one))
    assert CudaBackend().device(0) == torch.device("cuda", 0)
    assert current == {"device": 0, "stream": "default of 0"}


@pytest.mark.gpu
@pytest.mark.timeout(400)  # compiles its fused functions
def test_a_model_with_grouped_experts_trains_on_the_gpu():
    command = [sys.executable, str(ROOT / "benchmarks" / "throughput.py"), "--iterations=5"]
    result = subprocess.run(
        [*command, "--model-preset=tiny", "--vocab-size=256", "--seq-length=128"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("cuda: ")
