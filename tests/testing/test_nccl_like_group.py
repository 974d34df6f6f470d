# SPDX-License-Identifier: Apache-2.0
"""What the NCCL-like group computes, on the host and with ranks that share a GPU."""

import os

import pytest
import torch
import torch.distributed as dist

from megatron_moevement.backends.backend import BackendName
from tests.harness.nccl_like.abort import FOLDER_VARIABLE
from tests.harness.nccl_like.install import install

pytestmark = pytest.mark.distributed

RANKS = 3
SLEEP_CYCLES = 100_000_000  # some 50 ms


def own_tensor(device):
    """Returns two rows of this rank, which a GPU still computes when they are sent."""
    rows = torch.zeros(2, RANKS, device=device)
    if device == "cuda":
        torch.cuda._sleep(SLEEP_CYCLES)
    return rows.add_(10 * dist.get_rank()).add_(torch.arange(RANKS, device=device))


def around(tensor):
    """Sends a tensor to the next rank in a batch of messages; returns what has come in."""
    rank, received = dist.get_rank(), torch.empty_like(tensor)
    messages = [
        dist.P2POp(dist.isend, tensor, (rank + 1) % RANKS),
        dist.P2POp(dist.irecv, received, (rank - 1) % RANKS),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return received


def compute(device):
    """Returns what each operation leaves on this rank."""
    install(BackendName(device))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl")
    found = {}
    found["sum"] = own_tensor(device)
    dist.all_reduce(found["sum"])
    found["of rank 1"] = own_tensor(device)
    dist.broadcast(found["of rank 1"], 1)
    found["gathered"] = torch.empty(2 * RANKS, RANKS, device=device)
    dist.all_gather_into_tensor(found["gathered"], own_tensor(device))
    found["scattered"] = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(found["scattered"], own_tensor(device).flatten())
    found["exchanged"] = torch.empty(2 * RANKS, device=device)
    dist.all_to_all_single(found["exchanged"], own_tensor(device).flatten())
    found["around"] = around(own_tensor(device))
    dist.barrier()
    dist.destroy_process_group()
    assert {one.device.type for one in found.values()} == {device}
    return {name: one.flatten().tolist() for name, one in found.items()}


def expected(rank):
    rows = [torch.arange(RANKS).repeat(2, 1) + 10 * one for one in range(RANKS)]
    part = slice(2 * rank, 2 * rank + 2)
    values = {
        "sum": sum(rows),
        "of rank 1": rows[1],
        "gathered": torch.cat(rows),
        "scattered": sum(rows).flatten()[part],
        "exchanged": torch.cat([one.flatten()[part] for one in rows]),
        "around": rows[rank - 1],
    }
    return {name: one.flatten().tolist() for name, one in values.items()}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_operation_leaves_what_nccl_would(fork_server, tmp_path, device):
    env = {FOLDER_VARIABLE: str(tmp_path)}
    values = fork_server.run(compute, world_size=RANKS, args=[device], env=env).check().values
    assert list(values) == [expected(rank) for rank in range(RANKS)]
