# SPDX-License-Identifier: Apache-2.0
"""Every feature of the model, of parallelism and of precision trains, and does what it says."""

import dataclasses
import re
from collections import Counter
from enum import Enum
from pathlib import Path

import pytest
import torch

from megatron_moevement.runtime.coordination.commit_barrier import StopRequest
from megatron_moevement.runtime.coordination.progress import START
from tests.harness.tiny_job import PLAIN, TINY

pytestmark = pytest.mark.distributed

STEPS = 5
RECOMPUTABLE = {
    "DotProductAttention",
    "GroupedExperts",
    "MLP",
    "SharedExpertMLP",
    "TopKRouter",
    "TransformerLayer",
}
"""Modules of the network that recomputation names."""


class Effect(Enum):
    """How the losses of a feature are to those of the run that it is compared with."""

    OTHER = "other losses: the flag reaches the model"
    SAME = "the same bits"
    CLOSE = "the same but for rounding"


@dataclasses.dataclass(frozen=True)
class Feature:
    """One row of the table: flags on some ranks, and what they do to the losses."""

    flags: str = ""
    ranks: int = 1
    base: tuple[str, ...] = TINY
    effect: Effect | None = None
    than: str = "tiny"


PP2, EP2 = "--pipeline-model-parallel-size=2", "--expert-model-parallel-size=2"
TP2 = "--tensor-model-parallel-size=2 --sequence-parallel"
SHARDED = "--use-distributed-optimizer"
OVERLAPPED = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"
SHARED = "--moe-shared-expert-intermediate-size=32"
GROUPED = "--moe-grouped-gemm"
DENSE_FIRST = "--moe-layer-freq=[0]*1+[1]*1"
LAYOUT = "--pipeline-model-parallel-layout"
COUNTED = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
DROPOUT = "--attention-dropout=0.1 --hidden-dropout=0.1"
RECOMPUTED = f"{DROPOUT} {SHARED} {GROUPED} {DENSE_FIRST}"
BALANCING = "--moe-router-load-balancing-type"
BIAS = (
    "--moe-router-score-function=sigmoid --moe-router-enable-expert-bias "
    f"{BALANCING}=none --moe-aux-loss-coeff=0"
)
HALF = "--fp16 --initial-loss-scale=65536"


def other(flags, **fields):
    return Feature(flags, effect=Effect.OTHER, **fields)


def same(flags, than, **fields):
    return Feature(flags, effect=Effect.SAME, than=than, **fields)


def close(flags, than="tiny", **fields):
    return Feature(flags, effect=Effect.CLOSE, than=than, **fields)


def plain(flags, effect=Effect.OTHER):
    return Feature(flags, base=PLAIN, effect=effect, than="dense")


EXPERTS = {
    "tiny": Feature(),
    "grouped": close(GROUPED),
    "top1": other("--moe-router-topk=1 --moe-router-pre-softmax"),
    "top3": other("--moe-router-topk=3"),
    "shared": other(SHARED),
    "shared-gate": other(f"{SHARED} --moe-shared-expert-gate", than="shared"),
    "shared-allgather": close(f"{SHARED} --moe-token-dispatcher-type=allgather", "shared"),
    "allgather": close("--moe-token-dispatcher-type=allgather"),
    "dense-first": other(DENSE_FIRST),
    "every-second": other("--moe-layer-freq=2"),
    "aux-free": other(f"{BALANCING}=none --moe-aux-loss-coeff=0"),
    "z-loss": other("--moe-z-loss-coeff=1e-2"),
    "seq-aux": other(f"{BALANCING}=seq_aux_loss"),
    "global-aux": other(f"{BALANCING}=global_aux_loss"),
    "all-aux": other(
        f"{BALANCING} aux_loss seq_aux_loss global_aux_loss --moe-aux-loss-coeff .01 .02 .03"
    ),
    "sinkhorn": other(f"{BALANCING}=sinkhorn --moe-aux-loss-coeff=0"),
    "sigmoid": other("--moe-router-score-function=sigmoid"),
    "expert-bias": other(BIAS, than="sigmoid"),
    "expert-groups": other("--moe-router-num-groups=2 --moe-router-group-topk=1"),
    "scaled-scores": other("--moe-router-topk-scaling-factor=2.5"),
    "jitter": other("--moe-input-jitter-eps=0.1"),
    "router-fp64": close("--moe-router-dtype=fp64"),
    "capacity": other("--moe-expert-capacity-factor=0.5"),
    "capacity-position": other(
        "--moe-expert-capacity-factor=0.5 --moe-token-drop-policy=position", than="capacity"
    ),
    "capacity-padded": other("--moe-expert-capacity-factor=1 --moe-pad-expert-input-to-capacity"),
}
NETWORK = {
    "dense": Feature(base=PLAIN),
    "dense-rope": plain("--position-embedding-type=rope"),
    "dense-rope-half": plain("--position-embedding-type=rope --rotary-percent=0.5"),
    "dense-no-positions": plain("--position-embedding-type=none"),
    "dense-rms-norm": plain("--normalization=RMSNorm"),
    "dense-swiglu": plain("--swiglu"),
    "dense-squared-relu": plain("--squared-relu"),
    "dense-untied": plain("--untie-embeddings-and-output-weights"),
    "dense-unbiased": plain("--disable-bias-linear"),
    "dense-no-dropout": plain("--attention-dropout=0 --hidden-dropout=0"),
    "gqa": other("--group-query-attention --num-query-groups=2"),
    "wide-heads": other("--kv-channels=16"),
    "qk-layernorm": other("--qk-layernorm"),
    "rotary-interleaved": other("--rotary-interleaved"),
    "wide-embedding": other("--embedding-init-method-std=0.04"),
    "qkv-bias": other("--add-qkv-bias"),
    "dropout": other(DROPOUT),
}
RECOMPUTATION = {
    "kept": Feature(RECOMPUTED),
    "recompute-core_attn": same(f"{RECOMPUTED} --recompute-granularity=selective", "kept"),
    **{
        f"recompute-{module}": same(
            f"{RECOMPUTED} --recompute-granularity=selective --recompute-modules {module}", "kept"
        )
        for module in ("mlp", "moe", "shared_experts")
    },
    **{
        f"recompute-{method}": same(
            f"{RECOMPUTED} --recompute-granularity=full --recompute-method={method} "
            "--recompute-num-layers=1",
            "kept",
        )
        for method in ("uniform", "block")
    },
}
PRECISION = {
    "bf16": other("--bf16"),
    "bf16-grouped": other(f"--bf16 {GROUPED}"),
    "bf16-softmax-fp32": other("--bf16 --attention-softmax-in-fp32", than="bf16"),
    "fp16": other(HALF),
    "fp16-fixed-scale": other("--fp16 --loss-scale=1024"),
    "deterministic": same("--deterministic-mode", "tiny"),
    "fp16-reduced-in-fp32": other(f"{HALF} --accumulate-allreduce-grads-in-fp32", than="fp16"),
}
LAYOUTS = {
    "pp2": Feature(PP2, 2),
    "pp2-uneven": Feature(f"{PP2} --num-layers=3 --decoder-first-pipeline-num-layers=1", 2),
    "pp2-counted": same(f"{PP2} {COUNTED}", "pp2", ranks=2),
    "pp2-layout": same(f"{PP2} {LAYOUT}=Et|tL", "pp2", ranks=2),
    "pp2-fp16": other(f"{PP2} {HALF}", ranks=2, than="pp2"),
    "vpp2": Feature(f"{PP2} --num-layers=4 --num-virtual-stages-per-pipeline-rank=2", 2),
    "ep2": Feature(EP2, 2),
    "ep2-grouped": close(f"{EP2} {GROUPED}", "ep2", ranks=2),
    "ep2-allgather": close(f"{EP2} --moe-token-dispatcher-type=allgather", "ep2", ranks=2),
    "dp2": close("", ranks=2),
    "dp2-overlap": same("--overlap-grad-reduce", "dp2", ranks=2),
    "dp2-sharded": same(SHARDED, "dp2", ranks=2),
    "dp2-sharded-overlap": same(OVERLAPPED, "dp2", ranks=2),
    "dp2-sharded-overlap-bf16": other(f"{OVERLAPPED} --bf16", ranks=2, than="dp2"),
    "tp2": Feature(TP2, 2),
    "etp2": Feature("--expert-tensor-parallel-size=2", 2),
    "pp2-ep2": Feature(f"{PP2} {EP2}", 4),
    "pp2-dp2-ep2-sharded-bf16": Feature(f"{PP2} {EP2} {OVERLAPPED} {GROUPED} --bf16", 4),
    "tp2-ep2": Feature(f"{TP2} {EP2}", 4),
}
SLOW_LAYOUTS = {
    "tp2-etp1": Feature(f"{TP2} --expert-tensor-parallel-size=1", 2),
    "tp2-dense": Feature("--tensor-model-parallel-size=2", 2, base=PLAIN),
    "vpp2-layout": same(f"{PP2} --num-layers=4 {LAYOUT}=Et|t|t|tL", "vpp2", ranks=2),
    "vpp2-by-layers": same(
        f"{PP2} --num-layers=4 --num-layers-per-virtual-pipeline-stage=1", "vpp2", ranks=2
    ),
    "dp2-sharded-overlap-fp16": other(f"{OVERLAPPED} {HALF}", ranks=2, than="dp2"),
    "tp2-etp1-ep2": Feature(f"{TP2} --expert-tensor-parallel-size=1 {EP2}", 2),
    "pp4": Feature("--pipeline-model-parallel-size=4 --num-layers=4", 4),
    "dp3": Feature("--global-batch-size=12", 3),
    "dp3-sharded": same("--global-batch-size=12 --use-distributed-optimizer", "dp3", ranks=3),
    "tp2-pp2": Feature(f"{TP2} {PP2}", 4),
    "tp2-grouped-fp16": Feature(f"{TP2} {GROUPED} {HALF}", 2),
    "tp2-allgather": close(f"{TP2} --moe-token-dispatcher-type=allgather", "tp2", ranks=2),
    "tp2-shared-gate-qk": Feature(f"{TP2} {SHARED} --moe-shared-expert-gate --qk-layernorm", 2),
    "tp2-untied-qkv-bias": Feature(
        f"{TP2} --untie-embeddings-and-output-weights --add-qkv-bias", 2
    ),
    "tp2-seq-aux": Feature(f"{TP2} {BALANCING}=seq_aux_loss", 2),
    "tp2-kept": Feature(f"{TP2} {DROPOUT}", 2),
    "tp2-recompute": same(
        f"{TP2} {DROPOUT} --recompute-granularity=full --recompute-method=uniform "
        "--recompute-num-layers=1",
        "tp2-kept",
        ranks=2,
    ),
    "dp2-global-aux": Feature(f"{BALANCING}=global_aux_loss", 2),
    "pp2-expert-bias": Feature(f"{PP2} {BIAS}", 2),
    "pp2-dense-first": Feature(f"{PP2} {DENSE_FIRST}", 2),
    "ep2-dense-first": Feature(f"{EP2} {DENSE_FIRST}", 2),
    "ep2-capacity-padded": Feature(
        f"{EP2} --moe-expert-capacity-factor=1 --moe-pad-expert-input-to-capacity", 2
    ),
    "vpp2-uneven": Feature(
        f"{PP2} --num-layers=6 --num-virtual-stages-per-pipeline-rank=2 "
        "--decoder-first-pipeline-num-layers=2",
        2,
    ),
    "vpp2-dp2-sharded": Feature(
        f"{PP2} --num-layers=4 --num-virtual-stages-per-pipeline-rank=2 {OVERLAPPED}", 4
    ),
}
FEATURES = EXPERTS | NETWORK | RECOMPUTATION | PRECISION | LAYOUTS | SLOW_LAYOUTS
TABLE = [
    pytest.param(name, marks=[pytest.mark.slow] if name in SLOW_LAYOUTS else [])
    for name in FEATURES
]
RUN = ("--global-batch-size=8", f"--train-iters={STEPS}")


def train(base, flags):
    """Trains a few steps and returns what is known of them on this rank."""
    from megatron_moevement.training.steps import build_datasets, open_steps  # noqa: PLC0415
    from tests.harness.tiny_job import tiny_job  # noqa: PLC0415

    with tiny_job(*flags, base=base) as job:
        before, calls = job.digests(), count_forward_calls()
        with open_steps(job, build_datasets(job), START) as step:
            losses = [step.run(StopRequest.NONE).entry.loss for _ in range(STEPS)]
        after = job.digests()
        return {
            "losses": losses,
            "skipped": step.progress.skipped,
            "operators": sorted(after),
            "unchanged": [name for name in before if before[name] == after[name]],
            "digests": after,
            "auxiliary": job.metrics.collect(STEPS * job.batches.num_microbatches),
            "bias": expert_biases(job),
            "calls": dict(calls),
            "deterministic": [
                torch.are_deterministic_algorithms_enabled(),
                job.chunks[0].config.deterministic_mode,
            ],
        }


def count_forward_calls():
    """Counts from now on the forward passes of each class of modules."""
    from torch.nn.modules.module import register_module_forward_hook  # noqa: PLC0415

    calls = Counter()
    register_module_forward_hook(lambda module, *_: calls.update([type(module).__name__]))
    return calls


def expert_biases(job):
    buffers = (pair for chunk in job.chunks for pair in chunk.named_buffers())
    return [one for name, bias in buffers if name.endswith("expert_bias") for one in bias.tolist()]


class Runs:
    """The run of each feature, made when a test asks for it first."""

    def __init__(self, server):
        self.server, self.known = server, {}

    def __getitem__(self, name):
        if name not in self.known:
            feature = FEATURES[name]
            args = [list(feature.base), [*RUN, *feature.flags.split()]]
            self.known[name] = self.server.run(train, world_size=feature.ranks, args=args)
        return self.known[name].check().values


@pytest.fixture(scope="module")
def runs(megatron_fork_server):
    return Runs(megatron_fork_server)


@pytest.mark.parametrize("name", TABLE)
def test_the_loss_falls_and_every_operator_learns(runs, name):
    for rank in runs[name]:
        assert rank["losses"] == runs[name][0]["losses"]
        assert rank["losses"][-1] < rank["losses"][0] - 0.3
        assert rank["unchanged"] == []
        assert rank["skipped"] == 0


@pytest.mark.parametrize(
    "name", [param for param in TABLE if FEATURES[param.values[0]].effect is not None]
)
def test_a_feature_changes_the_losses_it_should_and_no_others(runs, name):
    feature = FEATURES[name]
    losses, expected = runs[name][0]["losses"], runs[feature.than][0]["losses"]
    if feature.effect is Effect.OTHER:
        assert losses != expected
    elif feature.effect is Effect.SAME:
        assert losses == expected
    else:
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "losses"),
    {
        "tiny": ["load_balancing_loss"],
        "aux-free": [],
        "z-loss": ["load_balancing_loss", "z_loss"],
        "seq-aux": ["seq_load_balancing_loss"],
        "global-aux": ["global_load_balancing_loss"],
        "all-aux": [
            "global_load_balancing_loss",
            "load_balancing_loss",
            "seq_load_balancing_loss",
        ],
        "dense": [],
    }.items(),
)
def test_the_auxiliary_losses_asked_for_are_reported(runs, name, losses):
    (rank,) = runs[name]
    assert sorted(rank["auxiliary"]) == losses
    assert all(loss > 0.5 for loss in rank["auxiliary"].values())


def test_the_expert_bias_moves_by_its_rate_up_and_down(runs):
    rate = 1e-3
    (rank,) = runs["expert-bias"]
    steps = [bias / rate for bias in rank["bias"]]
    whole = [round(step) for step in steps]
    assert steps == pytest.approx(whole, abs=1e-3)
    assert min(whole) < 0 < max(whole)
    assert max(map(abs, whole)) <= STEPS


@pytest.mark.parametrize(
    ("name", "recomputed"),
    {
        "recompute-core_attn": {"DotProductAttention"},
        "recompute-mlp": {"MLP"},
        "recompute-moe": {"TopKRouter", "GroupedExperts", "SharedExpertMLP"},
        "recompute-shared_experts": {"SharedExpertMLP"},
        "recompute-uniform": RECOMPUTABLE,
        "recompute-block": {"TransformerLayer", "DotProductAttention", "MLP"},  # the first layer
    }.items(),
)
def test_what_is_to_be_recomputed_runs_again_and_nothing_else(runs, name, recomputed):
    ((rank,), (kept,)) = runs[name], runs["kept"]
    again = {kind for kind in RECOMPUTABLE if rank["calls"][kind] > kept["calls"][kind]}
    assert again == recomputed
    assert rank["digests"] == kept["digests"]


def test_deterministic_mode_reaches_torch_and_the_model(runs):
    ((deterministic,), (ordinary,)) = runs["deterministic"], runs["tiny"]
    assert deterministic["deterministic"] == [True, True]
    assert ordinary["deterministic"] == [False, False]


def test_dense_layers_come_first_where_asked(runs):
    (rank,) = runs["dense-first"]
    experts = [name for name in rank["operators"] if ".experts." in name]
    assert experts == [f"layers.1.experts.{expert}" for expert in range(4)]


def test_uneven_stages_have_the_layers_that_were_asked_for(runs):
    layers = [
        {name.split(".")[1] for name in rank["operators"] if name.startswith("layers.")}
        for rank in runs["pp2-uneven"]
    ]
    assert layers == [{"0"}, {"1", "2"}]


def test_sharded_optimizers_hold_a_part_of_the_state_each(runs):
    one, other = (rank["digests"] for rank in runs["dp2-sharded"])
    assert one.keys() == other.keys()
    assert all(one[name] != other[name] for name in one)


def test_the_table_in_the_documents_has_these_rows_and_no_others():
    root = Path(__file__).parents[2]
    text = (root / "docs" / "use" / "features.md").read_text()
    cells = [line.split(" | ")[1] for line in text.splitlines() if line.startswith("| ")]
    assert set(re.findall(r"`([^`]+)`", " ".join(cells))) == FEATURES.keys()
    slow = re.findall(r"\*`([^`]+)`\*", text)
    assert sorted(slow) == sorted(SLOW_LAYOUTS)
    assert all(
        (root / path).is_file() for path in re.findall(r"`(tests/[^`]+|megatron_[^`]+)`", text)
    )
