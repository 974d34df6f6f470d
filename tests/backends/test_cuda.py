"""The CUDA backend: what it asks of its machine, and, with a GPU, that training runs on it."""

import subprocess
import sys
from pathlib import Path

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


def test_more_ranks_than_gpus_is_an_error_with_the_number_of_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"LOCAL_RANK 1: this machine has 1 CUDA device"):
        CudaBackend().device(1)


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
