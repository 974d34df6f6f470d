# SPDX-License-Identifier: Apache-2.0
"""A step with frozen operators changes no bit of what else there is, and nothing of theirs."""

import contextlib
import importlib

import pytest
import torch
import torch.distributed as dist

from tests.harness.default_run import slow_but
from tests.harness.tiny_job import PLAIN, TINY

pytestmark = pytest.mark.distributed

GROUPED = "--moe-grouped-gemm"
SHARDED = "--use-distributed-optimizer"
OVERLAP = "--overlap-grad-reduce"
OVERLAPPED = (SHARDED, OVERLAP, "--overlap-param-gather")
PP2 = "--pipeline-model-parallel-size=2"
EP2 = "--expert-model-parallel-size=2"
BIAS = (
    "--moe-router-score-function=sigmoid",
    "--moe-router-enable-expert-bias",
)
DROPOUT = ("--attention-dropout=0.1", "--hidden-dropout=0.1")
SHARED = ("--moe-shared-expert-intermediate-size=32", "--moe-shared-expert-gate")
RECOMPUTE = (
    "--recompute-granularity=full",
    "--recompute-method=uniform",
    "--recompute-num-layers=1",
)
MODULES = ("--recompute-modules", "core_attn", "moe", "shared_experts")
JOBS = {
    "fp32": (1, TINY, [*DROPOUT]),
    "bf16": (1, TINY, ["--bf16", *SHARED, "--qk-layernorm", "--add-qkv-bias"]),
    "fp16": (1, TINY, ["--fp16", "--initial-loss-scale=1024", *BIAS]),
    "grouped": (1, TINY, [GROUPED, "--untie-embeddings-and-output-weights"]),
    "grouped-bf16": (1, TINY, [GROUPED, "--bf16"]),
    "recompute": (1, TINY, [*RECOMPUTE, *DROPOUT]),
    "recompute-selective": (1, TINY, ["--recompute-granularity=selective", *MODULES, *BIAS]),
    "biases": (1, PLAIN, []),
    "ep2": (2, TINY, [EP2, GROUPED, "--bf16", *BIAS]),
    "ep2-sharded-fp16": (2, TINY, [EP2, SHARDED, "--fp16", "--initial-loss-scale=1024"]),
    "pp2-tied": (2, TINY, [PP2, "--bf16", *DROPOUT]),
    "vpp2": (2, TINY, [PP2, "--num-layers=4", "--num-virtual-stages-per-pipeline-rank=2"]),
    "vpp2-overlapped": (
        2,
        TINY,
        [PP2, "--num-layers=4", "--num-virtual-stages-per-pipeline-rank=2", OVERLAP, "--bf16"],
    ),
    "dp3": (3, TINY, [OVERLAP, "--ddp-bucket-size=5000"]),
    "dp3-sharded": (3, TINY, [*OVERLAPPED, "--bf16", "--ddp-bucket-size=5000"]),
    "tp2": (2, TINY, ["--tensor-model-parallel-size=2", "--sequence-parallel", "--bf16"]),
    "tp4": (4, TINY, ["--tensor-model-parallel-size=4", "--sequence-parallel", "--qk-layernorm"]),
    "tp2-dense": (2, PLAIN, ["--tensor-model-parallel-size=2", *OVERLAPPED]),
}


def frozen_step(base, flags):
    """Yields a job after two steps, ready to repeat the third."""
    from tests.harness.frozen_step import opened_frozen_step  # noqa: PLC0415

    return opened_frozen_step(base, flags)


def compare(step, expected, active):
    from tests.harness.frozen_step import compare_frozen  # noqa: PLC0415

    return compare_frozen(step, expected, active)


def freeze_at_random(base, flags, seeds):
    with frozen_step(base, flags) as step:
        from tests.harness.frozen_step import random_active  # noqa: PLC0415

        operators = step.operators()
        expected = step.run(frozenset(operators))
        found = {}
        for seed in seeds:
            found[str(seed)], _ = compare(step, expected, random_active(operators, seed))
        found["none active"], _ = compare(step, expected, frozenset())
        return found


BY_DEFAULT = ("grouped-bf16", "pp2-tied", "dp3-sharded")


@pytest.mark.parametrize("name", slow_but(BY_DEFAULT, JOBS))
def test_nothing_else_changes_a_bit_and_nothing_frozen_changes_at_all(megatron_fork_server, name):
    ranks, base, flags = JOBS[name]
    args = [list(base), flags, [1, 2, 3]]
    job = megatron_fork_server.run(freeze_at_random, world_size=ranks, args=args)
    for found in job.check().values:
        assert found == {which: {} for which in found}


def freeze_a_stage(flags, rank):
    with frozen_step(TINY, flags) as step:
        operators = frozenset(step.operators())
        expected = step.run(operators)
        of_rank = [step.freezing.operators]
        dist.broadcast_object_list(of_rank, src=rank)
        found, seen = compare(step, expected, operators - of_rank[0])
        return [found, seen.flops, expected.flops - seen.flops, flops_of(step, of_rank[0], seen)]


def flops_of(step, operators, seen):
    return step.weight_gradient_flops(operators, seen.tokens)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stage_may_be_frozen_as_a_whole(megatron_fork_server, rank):
    flags = [PP2, "--untie-embeddings-and-output-weights", *DROPOUT]
    job = megatron_fork_server.run(freeze_a_stage, world_size=2, args=[flags, rank]).check()
    for each, (found, computed, skipped, weight_gradients) in enumerate(job.values):
        assert found == {}
        if each != rank:
            assert skipped == 0
        elif each == 0:  # nobody wants the gradient of the first stage's input either
            assert skipped > 1.9 * computed
        else:
            assert skipped == weight_gradients > 0.4 * computed


def count_flops(base, flags, seeds):
    """Returns for each seed the products that were skipped, and those of frozen weights."""
    from tests.harness.frozen_step import random_active  # noqa: PLC0415

    with frozen_step(base, flags) as step:
        operators = step.operators()
        ends = {one for one in operators if str(one) in {"embedding", "head"}}
        expected = step.run(frozenset(operators))
        counts = []
        for seed in seeds:
            active = random_active(operators, seed) | ends  # so that all inputs want a gradient
            found, seen = compare(step, expected, active)
            assert found == {}
            frozen = step.freezing.operators - active
            counts.append([expected.flops - seen.flops, flops_of(step, frozen, seen)])
        return counts


COUNTED = ("fp32", "bf16", "fp16", "grouped", "grouped-bf16", "biases", "ep2", "vpp2", "dp3")


@pytest.mark.parametrize("name", slow_but(("grouped-bf16", "biases", "ep2"), COUNTED))
def test_the_weight_gradients_of_frozen_operators_are_not_computed(megatron_fork_server, name):
    ranks, base, flags = JOBS[name]
    args = [list(base), flags, [1, 2, 3, 4]]
    job = megatron_fork_server.run(count_flops, world_size=ranks, args=args).check()
    for counts in job.values:
        assert all(skipped == expected for skipped, expected in counts)
        assert any(expected for _, expected in counts)


def freeze_and_thaw(base, flags):
    """Trains three steps, and the same with a frozen step before each; returns what differs."""
    from tests.harness.frozen_step import differences, random_active  # noqa: PLC0415

    with frozen_step(base, flags) as step:
        operators = frozenset(step.operators())
        ordinary = [step.run(operators) for _ in range(3)]
        found = []
        for expected in ordinary:
            step.restore()
            active = random_active(sorted(operators), seed=5)
            step.run(active, expected.statistics)
            step.run(random_active(sorted(operators), seed=6), expected.statistics)
            step.restore()
            for again in ordinary:
                seen = step.run(operators)
                found += [seen.loss == again.loss, seen.statistics == again.statistics]
                found += [
                    not differences(getattr(seen, what)[one], getattr(again, what)[one])
                    for what in ("gradients", "state")
                    for one in step.freezing.operators
                ]
                found.append(not differences(seen.sent, again.sent))
            hooks = [len(chunk.remove_forward_pre_hook_handles) > 0 for chunk in step.job.chunks]
            config = step.job.chunks[0].ddp_config
            gathers = "--overlap-param-gather" in flags
            found += [hook == gathers for hook in hooks]
            found.append(config.overlap_param_gather == gathers)
            found.append(config.overlap_grad_reduce == (OVERLAP in flags))
        return [len(found), all(found)]


THAWED = ("fp32", "recompute", "ep2-sharded-fp16", "dp3", "dp3-sharded", "vpp2-overlapped")


@pytest.mark.parametrize("name", slow_but(("fp32",), THAWED))
def test_with_all_operators_active_again_a_step_is_an_ordinary_one(megatron_fork_server, name):
    ranks, base, flags = JOBS[name]
    job = megatron_fork_server.run(freeze_and_thaw, world_size=ranks, args=[list(base), flags])
    for count, same in job.check().values:
        assert count > 50
        assert same


def freeze_on_one_rank(flags):
    """Repeats a step where each rank is told of its own operators only, and one has no frozen."""
    with frozen_step(TINY, flags) as step:
        expected = step.run(frozenset(step.operators()))
        frozen = {one for one in step.freezing.operators if (one.expert or 0) > 2}
        active = step.freezing.operators - frozen
        found = [compare(step, expected, active)[0] for _ in range(3)]
        return [len(frozen), found]


@pytest.mark.parametrize("name", slow_but(("ep2-overlapped",), ("ep2", "ep2-overlapped")))
def test_a_rank_may_have_nothing_to_freeze_where_another_has(megatron_fork_server, name):
    flags = [EP2, "--bf16", *(OVERLAPPED if name == "ep2-overlapped" else ())]
    flags += ["--ddp-bucket-size=5000"] if name == "ep2-overlapped" else []
    job = megatron_fork_server.run(freeze_on_one_rank, world_size=2, args=[flags])
    assert job.check().values == ([0, [{}] * 3], [2, [{}] * 3])


def overflow(flags):
    """Replays a step that overflowed; returns the scales before and after, and what differs."""
    with frozen_step(TINY, flags) as step:
        operators = step.operators()
        before = step.job.optimizer.scalers()
        expected = step.run(frozenset(operators))
        found = [compare(step, expected, frozenset(operators[first::2]))[0] for first in (0, 1)]
        found.append(compare(step, expected, frozenset())[0])
        scales = [[one["scale"] for one in scalers] for scalers in (before, expected.scalers)]
        return [expected.statistics.overflow, scales, found]


@pytest.mark.parametrize("kind", [(), (SHARDED,)])
def test_a_step_that_overflowed_is_skipped_and_moves_the_scales(megatron_fork_server, kind):
    flags = [EP2, "--fp16", "--initial-loss-scale=4294967296", "--hysteresis=1", *kind]
    job = megatron_fork_server.run(overflow, world_size=2, args=[flags]).check()
    for overflowed, (before, after), found in job.values:
        assert overflowed
        assert after == [scale / 2 for scale in before]
        assert found == [{}, {}, {}]


def replay_without_collectives(flags):
    """Prepares and commits a replayed step where every collective raises."""
    with frozen_step(TINY, flags) as step:
        optimizer = step.job.optimizer
        operators = frozenset(step.operators())
        statistics = step.run(operators).statistics
        step.restore()
        step.freezing.set_active(frozenset(sorted(operators)[::2]))
        step.job.schedule.forward_backward(step._batches)
        with pytest.raises(ValueError, match="have to come from the ledger"):
            optimizer.prepare()
        calls = []
        for name in [one for one in vars(dist.ProcessGroup) if "reduce" in one or "gather" in one]:
            setattr(dist.ProcessGroup, name, lambda *_, name=name, **__: calls.append(name))
        optimizer.commit(optimizer.prepare(statistics))
        return calls


@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
def test_a_replayed_step_asks_no_other_rank_for_norm_and_overflow(megatron_fork_server, precision):
    flags = [PP2, precision, "--initial-loss-scale=1024"]
    job = megatron_fork_server.run(replay_without_collectives, world_size=2, args=[flags])
    assert job.check().values == ([], [])


def overflow_unlike_the_ledger():
    from megatron_moevement.integrations.megatron.optimizer import (  # noqa: PLC0415
        GradientStatistics,
        UnlikeLedgerError,
    )

    with frozen_step(TINY, ["--fp16", "--initial-loss-scale=4294967296"]) as step:
        step.job.schedule.forward_backward(step._batches)
        with pytest.raises(UnlikeLedgerError, match="optimizer 0: a replayed gradient overflows"):
            step.job.optimizer.prepare(GradientStatistics(found_inf=(False,), norm=1.0))


def test_an_overflow_that_the_ledger_does_not_know_is_an_error(megatron_fork_server):
    megatron_fork_server.run(overflow_unlike_the_ledger, world_size=1).check()


def count_reductions(flags, kinds):
    """Returns how many buckets are reduced when operators of these kinds are frozen."""
    from megatron.core.distributed.param_and_grad_buffer import (  # noqa: PLC0415
        _ParamAndGradBucketGroup,
    )

    upstream, reduced = _ParamAndGradBucketGroup.start_grad_sync, []

    def count(group, *args, **kwargs):
        reduced.append(group)
        return upstream(group, *args, **kwargs)

    _ParamAndGradBucketGroup.start_grad_sync = count
    with frozen_step(TINY, flags) as step:
        expected = step.run(frozenset(step.operators()))
        reduced.clear()
        active = [one for one in step.operators() if one.kind.name not in kinds]
        found, _ = compare(step, expected, frozenset(active))
        return [found, len(reduced)]


DENSE = ("GATE", "NON_EXPERT", "EMBEDDING", "HEAD")


@pytest.mark.parametrize(
    ("kinds", "buckets"),
    [
        pytest.param(("GATE",), 2, marks=pytest.mark.slow),
        (("EXPERT",), 1),
        pytest.param(DENSE, 1, marks=pytest.mark.slow),
        (("EXPERT", *DENSE), 0),
    ],
)
def test_what_is_frozen_as_a_whole_is_not_reduced(megatron_fork_server, kinds, buckets):
    args = [[EP2], list(kinds)]
    job = megatron_fork_server.run(count_reductions, world_size=2, args=args).check()
    assert job.values == ([{}, buckets],) * 2


def test_experts_of_one_numbered_module_are_frozen_together():
    from megatron_moevement.integrations.megatron import freezing  # noqa: PLC0415

    module = torch.nn.Module()
    for name in ("weight0", "weight1", "bias0", "bias1", "layer_norm_weight"):
        module.register_parameter(name, torch.nn.Parameter(torch.zeros(1)))
    own = dict(module.named_parameters())
    (group,) = freezing.frozen_together(torch.nn.Sequential(torch.nn.Linear(2, 2), module))
    assert {id(one) for one in group} == {
        id(one) for name, one in own.items() if name != "layer_norm_weight"
    }


@contextlib.contextmanager
def nothing(*_, **__):
    yield


MUTATIONS = {
    "gradients of zeros are kept": ("optimizer", "drop_gradient", lambda _: None, "bf16"),
    "all masters are cast": ("masters", "_CopiedMasters._casting_all_but", nothing, "bf16"),
    "all shards are cast": ("masters", "_CopiedMasters._casting_all_but", nothing, "dp3-sharded"),
    "norms are added up shorter": ("freezing", "Freezing._as_if_trained", nothing, "tp4"),
    "no graph to recompute": ("freezing", "Freezing._graph_from", nothing, "recompute"),
    "reductions overlap": ("freezing", "_no_overlap", nothing, "dp3"),
}
SEEN_BY = {
    "gradients of zeros are kept": {"frozen"},
    "all masters are cast": {"frozen"},
    "all shards are cast": {"frozen"},
    "norms are added up shorter": {"gradient", "state"},
    "no graph to recompute": {"gradient", "state"},
    "reductions overlap": {"Communication call has not been issued"},
}


def mutate(module, name, replacement):
    owner = importlib.import_module(f"megatron_moevement.integrations.megatron.{module}")
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    assert hasattr(owner, last)
    setattr(owner, last, replacement)


def freeze_mutated(mutation, base, flags):
    """Returns what differs from the ordinary step, or why it can't be computed."""
    module, name, replacement, _ = MUTATIONS[mutation]
    mutate(module, name, replacement)
    try:
        found = freeze_at_random(base, flags, [1, 2, 3])
    except AssertionError as error:
        return [str(error).partition(" for ")[0]]
    return sorted({what for each in found.values() for what in each})


@pytest.mark.parametrize(
    "mutation", slow_but(("gradients of zeros are kept", "reductions overlap"), MUTATIONS)
)
def test_each_mutation_is_seen(megatron_fork_server, mutation):
    ranks, base, flags = JOBS[MUTATIONS[mutation][-1]]
    args = [mutation, list(base), flags]
    job = megatron_fork_server.run(freeze_mutated, world_size=ranks, args=args).check()
    assert all(set(seen) == SEEN_BY[mutation] for seen in job.values)
