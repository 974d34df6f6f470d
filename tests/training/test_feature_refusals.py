# SPDX-License-Identifier: Apache-2.0
"""What can't work is refused at the start, with one line that says why."""

import pytest

from megatron_moevement.errors import UserError
from tests.harness.tiny_job import PLAIN, TINY, tiny_arguments

PP2 = "--pipeline-model-parallel-size=2"
BALANCING = "--moe-router-load-balancing-type"
SELECTIVE = "--recompute-granularity=selective --recompute-modules"

REFUSED = {
    "--moe-router-num-groups=4 --moe-router-group-topk=1": "at most 1 experts of each group",
    "--moe-router-num-groups=2 --moe-router-group-topk=2 --moe-router-topk=3": "multiple of",
    "--moe-router-num-groups=3 --moe-router-group-topk=1": "must divide --num-experts 4",
    "--moe-router-num-groups=2": "need each other",
    f"{BALANCING} sinkhorn aux_loss --moe-aux-loss-coeff 0 0": "sinkhorn excludes all others",
    f"{BALANCING} aux_loss none --moe-aux-loss-coeff 1 0": "none excludes all others",
    f"{BALANCING}=sinkhorn --moe-aux-loss-coeff=0 --moe-router-enable-expert-bias": "no bias",
    f"{SELECTIVE} layernorm": "layernorm needs",
    f"--moe-grouped-gemm {SELECTIVE} moe moe_act": "moe_act needs",
    f"{PP2} --num-layers=6 --num-layers-per-virtual-pipeline-stage=2": "no multiple of",
    f"{PP2} --num-virtual-stages-per-pipeline-rank=1": "two chunks or more",
    f"{PP2} --num-layers=3 --decoder-first-pipeline-num-layers=1 "
    "--num-layers-per-virtual-pipeline-stage=1": "takes stages of one size",
    "--tensor-model-parallel-size=2": "needs --sequence-parallel",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_would_not_work_is_refused_with_the_reason(flags):
    with pytest.raises(UserError, match=REFUSED[flags]) as refused:
        tiny_arguments(*flags.split(), world_size=2, base=TINY)
    assert "\n" not in str(refused.value)


def test_experts_of_local_modules_with_biases_are_refused():
    with pytest.raises(UserError, match="local experts have no biases"):
        tiny_arguments("--num-experts=4", base=PLAIN)
    assert tiny_arguments("--num-experts=4", "--disable-bias-linear", base=PLAIN)


MEGATRON_REFUSES = {
    "--moe-router-topk=1": "pre-softmax",
    "--moe-router-enable-expert-bias": "sigmoid",
    "--moe-pad-expert-input-to-capacity": "moe_expert_capacity_factor",
    f"{BALANCING}=sinkhorn --moe-aux-loss-coeff=0 --moe-expert-capacity-factor=1": "aux_loss",
    f"{SELECTIVE} bogus": "bogus",
}


def refusal(flags):
    """Returns the line with which building the job is refused."""
    from tests.harness.tiny_job import tiny_job  # noqa: PLC0415

    with pytest.raises(UserError) as refused, tiny_job(*flags):
        pass
    return str(refused.value)


@pytest.mark.distributed
@pytest.mark.parametrize("flags", MEGATRON_REFUSES)
def test_what_megatron_refuses_is_one_line_as_well(megatron_fork_server, flags):
    job = megatron_fork_server.run(refusal, world_size=1, args=[flags.split()])
    (line,) = job.check().values
    assert MEGATRON_REFUSES[flags] in line
    assert "\n" not in line
