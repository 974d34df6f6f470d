# SPDX-License-Identifier: Apache-2.0
"""The level of a guarantee follows from what computes the bits, and is never won back."""

import dataclasses
import json

import pytest

from megatron_moevement.policy.job.guarantee import (
    Computation,
    Computations,
    DeviceKind,
    Guarantee,
    Kernels,
    Level,
    decide_guarantee,
    deciding_variables,
    unverified,
)

CPU = Computation(DeviceKind.CPU, Kernels.ANY, 1, {"processor": "p", "torch": "2.13.0"}, {})
PINNED = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
GPU = Computation(
    DeviceKind.CUDA, Kernels.DETERMINISTIC, 8, {"GPU": "H100", "NCCL": "2.27"}, PINNED
)
OTHER_VALUES = {
    "device": DeviceKind.CUDA,
    "kernels": Kernels.DETERMINISTIC,
    "threads": 2,
    "parts": {**CPU.parts, "processor": "q"},
    "variables": {"MKL_CBWR": "AVX2"},
}


def job(*by_rank, hosts=None):
    """Returns what ranks compute with, on one machine where none are named."""
    return Computations(by_rank, hosts or ("host0",) * len(by_rank))


def machines(*hosts):
    """Returns GPUs, one rank each, on the named machines."""
    gpus = [
        dataclasses.replace(GPU, parts=placed(hosts[:rank].count(host)))
        for rank, host in enumerate(hosts)
    ]
    return job(*gpus, hosts=hosts)


def placed(number):
    return {**GPU.parts, "GPU of its machine": f"0:{number}:0"}


def test_one_thread_or_deterministic_kernels_are_exact_on_the_cpu():
    several = dataclasses.replace(CPU, threads=4)
    deterministic = dataclasses.replace(several, kernels=Kernels.DETERMINISTIC)
    assert decide_guarantee(job(CPU, CPU)).level is Level.EXACT
    assert decide_guarantee(job(deterministic)).level is Level.EXACT
    assert decide_guarantee(job(CPU, several)).lacking == (
        "several threads per operation without --deterministic-mode",
    )


def test_a_gpu_with_everything_pinned_is_exact():
    assert decide_guarantee(job(GPU, GPU)) == Guarantee()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, None) for name in PINNED),
        ("NCCL_ALGO", "^NVLS"),
        ("NCCL_ALGO", "NVLS"),
        ("NCCL_ALGO", "Ring,Tree"),
        ("NCCL_ALGO", "Tree"),  # has no broadcast
        ("NCCL_ALGO", "AllReduce:Tree"),  # and anything for the others
        ("NCCL_ALGO", "Ring;AllReduce:Ring,Tree"),
        ("NCCL_ALGO", "Ring;Broadcast:Tree"),
        ("NCCL_ALGO", "Ring;AllToAll:Tree"),
        ("NCCL_PROTO", "LL128"),  # wires may not carry it
        ("NCCL_PROTO", "Simple;AllReduce:LL128"),
        ("NCCL_PROTO", "LL,Simple"),
        ("NCCL_PROTO", "^LL128"),
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0"),
    ],
)
def test_what_nccl_or_cublas_may_choose_is_not_exact(name, value):
    variables = {key: text for key, text in {**PINNED, name: value}.items() if text is not None}
    loose = dataclasses.replace(GPU, variables=variables)
    [reason] = decide_guarantee(job(GPU, loose)).lacking
    assert reason.startswith(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_ALGO", "RING"),
        ("NCCL_ALGO", "ring;allreduce:tree"),
        (
            "NCCL_ALGO",
            "AllReduce:Tree;AllGather:Ring;ReduceScatter:Ring;Reduce:Ring;Broadcast:Ring",
        ),
        ("NCCL_PROTO", "ll"),
        ("NCCL_PROTO", "Simple;AllGather:LL"),
    ],
)
def test_one_choice_for_each_collective_is_exact(name, value):
    fixed = dataclasses.replace(GPU, variables={**PINNED, name: value})
    assert decide_guarantee(job(fixed)).level is Level.EXACT


def test_kernels_chosen_by_times_are_not_exact():
    tuned = dataclasses.replace(GPU, variables={**PINNED, "PYTORCH_TUNABLEOP_ENABLED": "1"})
    assert decide_guarantee(job(tuned)).level is Level.CONSISTENT


def test_other_kernels_are_not_exact_on_a_gpu():
    loose = dataclasses.replace(GPU, kernels=Kernels.ANY)
    assert decide_guarantee(job(loose)).lacking == ("--deterministic-mode is off",)


def test_transformer_engine_has_a_switch_of_its_own():
    engine = dataclasses.replace(GPU, parts={**GPU.parts, "transformer_engine": "2.9"})
    pinned = {**PINNED, "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    assert decide_guarantee(job(engine)).level is Level.CONSISTENT
    assert decide_guarantee(job(dataclasses.replace(engine, variables=pinned))).level is Level.EXACT


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_a_spare_that_computes_otherwise_breaks_it(name):
    spare = dataclasses.replace(CPU, **{name: OTHER_VALUES[name]})
    guarantee = decide_guarantee(job(CPU, spare), job(CPU, CPU))
    assert guarantee.level is Level.CONSISTENT
    assert all("rank 1" in reason for reason in guarantee.lacking if "than at first" in reason)


def test_a_spare_of_the_same_kind_on_another_machine_does_not_break_it():
    moved = job(CPU, CPU, hosts=("host0", "host1"))
    assert decide_guarantee(moved, job(CPU, CPU)).level is Level.EXACT
    before, after = machines("a", "a", "b", "b"), machines("a", "a", "c", "c")
    assert decide_guarantee(after, before).level is Level.EXACT


def test_ranks_of_another_machine_or_gpu_break_it_with_nccl():
    before = machines("a", "a", "b", "b")
    moved = dataclasses.replace(before, hosts=("a", "a", "b", "c"))
    assert decide_guarantee(moved, before).lacking == (
        "ranks are spread over machines otherwise than at first",
    )
    other = dataclasses.replace(GPU, parts=placed(7))
    other = dataclasses.replace(before, by_rank=(*before.by_rank[:3], other))
    assert decide_guarantee(other, before).lacking == (
        "rank 3 has another GPU of its machine than at first",
    )


def test_what_is_lost_stays_lost_and_is_said_once():
    lost = unverified(Guarantee(), 7)
    assert lost.level is Level.CONSISTENT
    again = decide_guarantee(job(CPU), job(CPU), unverified(lost, 7))
    assert again == lost
    assert "step 7" in str(again)
    assert str(decide_guarantee(job(CPU))) == "EXACT: a recovery changes no bit"


@pytest.mark.parametrize("own", [CPU, GPU])
def test_a_computation_survives_json(own):
    assert Computation.of_document(json.loads(json.dumps(own.document()))) == own


@pytest.mark.parametrize(
    "name",
    [
        *PINNED,
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "NVTE_FLASH_ATTN",
        "NCCL_NVLS_ENABLE",
        "NCCL_TOPO_FILE",
        "NCCL_GRAPH_FILE",
        "NCCL_IB_HCA",
        "NCCL_CROSS_NIC",
        "NCCL_BUFFSIZE",
        "NCCL_NTHREADS",
        "NCCL_MAX_CTAS",
        "NCCL_TUNER_PLUGIN",
        "CUBLASLT_WORKSPACE_SIZE",
        "TORCH_BLAS_PREFER_CUBLASLT",
        "PYTORCH_TUNABLEOP_ENABLED",
    ],
)
def test_a_spare_with_another_variable_that_decides_bits_breaks_it(name):
    environment = {**PINNED, "HOME": "/root", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    before, after = (
        dataclasses.replace(GPU, variables=deciding_variables({**environment, **more}))
        for more in ({}, {name: "another"})
    )
    reasons = decide_guarantee(job(after), job(before)).lacking
    assert f"rank 0 has another {name} than at first" in reasons


@pytest.mark.parametrize("name", ["HOME", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_HOSTID"])
def test_a_variable_that_decides_no_bit_is_not_compared(name):
    assert deciding_variables({name: "1"}) == {}
