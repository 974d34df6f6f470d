# SPDX-License-Identifier: Apache-2.0
"""Whatever an interrupted step leaves behind, the next one finds nothing of it."""

import functools
import gc

import pytest

from megatron_moevement.runtime.coordination.commit_barrier import StopRequest
from megatron_moevement.runtime.coordination.progress import START
from tests.harness.default_run import slow_but
from tests.harness.tiny_job import tiny_job

pytestmark = pytest.mark.distributed

FLAGS = (
    "--fp16",
    "--initial-loss-scale=65536",
    "--loss-scale-window=2",
    "--overlap-grad-reduce",
    "--moe-router-load-balancing-type=global_aux_loss",
    "--moe-aux-loss-coeff=1e-2",
    "--moe-router-score-function=sigmoid",
    "--moe-router-enable-expert-bias",
    "--moe-shared-expert-intermediate-size=32",
    "--attention-dropout=0.1",
    "--hidden-dropout=0.1",
)
SHARDED = (*FLAGS, "--use-distributed-optimizer", "--overlap-param-gather")
OF_GATHERS_AHEAD = ("gather_flags", "gather_handles", "hooks")
FUNCTIONS = ("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func")
OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather")
ROUTER_COUNTERS = ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps")
OF_A_BUCKET_GROUP = (
    "grad_reduce_handle",
    "param_gather_handle",
    "param_gather_dispatched",
    "is_last_microbatch",
    "per_param_grad_ready_counts",
    "golden_per_param_grad_ready_counts",
    "is_first_batch",
)


class OnPurposeError(Exception):
    """What the interrupts of these tests raise."""


def fail(*_, **__):
    raise OnPurposeError


def modules(job, kind):
    return [each for chunk in job.chunks for each in chunk.modules() if type(each).__name__ == kind]


def bucket_groups(job):
    return [
        group
        for chunk in job.chunks
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups
    ]


def dirty_gradients(job):
    for chunk in job.chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            buffer.grad_data.fill_(7)
        for parameter in chunk.parameters():
            parameter.grad = parameter.detach().clone()
            parameter.grad_added_to_main_grad = True


def dirty_masters(job):
    for part in job.optimizer.parts:
        for group in part.optimizer.param_groups:
            for master in group["params"]:
                master.grad = master.detach().clone()


def dirty_router_counters(job):
    for router in modules(job, "TopKRouter"):
        router.local_tokens_per_expert.fill_(5)
        router.global_tokens_per_expert.fill_(5)
        router.ga_steps.fill_(3)


def dirty_expert_bias(job):
    biases = [router.expert_bias for router in modules(job, "TopKRouter")]
    job.expert_bias.note(biases, [bias + 1 for bias in biases])


def dirty_router_counts(job):
    job.router_counts._step.fill_(5)


def dirty_bucket_counts(job):
    for group in bucket_groups(job):
        group.per_param_grad_ready_counts = {next(iter(group.params)): 1}
        group.is_last_microbatch = False


def dirty_bucket_order(job):
    for group in bucket_groups(job):
        group.golden_per_param_grad_ready_counts = {next(iter(group.params)): 1}
        group.is_first_batch = False


def dirty_handles(job):
    class Stale:
        def wait(self):
            raise AssertionError("a handle of a former generation was waited for")

    for group in bucket_groups(job):
        group.grad_reduce_handle = Stale()


def dirty_gather_flags(job):
    for group in bucket_groups(job):
        group.param_gather_dispatched = True


def dirty_gather_handles(job):
    for group in bucket_groups(job):
        group.param_gather_handle = fail


def dirty_forced_reduction(job):
    for chunk in job.chunks:
        chunk.force_all_reduce = True


def dirty_schedule_functions(job):
    config = job.chunks[0].config
    config.no_sync_func = config.grad_sync_func = config.param_sync_func = fail
    config.finalize_model_grads_func = None


def dirty_checkpointing(job):
    del job
    from megatron.core.tensor_parallel import random  # noqa: PLC0415

    random.IS_CHECKPOINTING = True


def dirty_random_streams(job):
    """An interrupt inside of `fork`, before it is in its `try` or in its `finally`."""
    del job
    from megatron.core.tensor_parallel import random  # noqa: PLC0415

    random.get_cuda_rng_tracker()._current_state_name = random._MODEL_PARALLEL_RNG_TRACKER_NAME


def dirty_scalers(job):
    for part in job.optimizer.parts:
        part.grad_scaler.update(True)


def dirty_metrics(job):
    from megatron.core.transformer.moe.moe_utils import (  # noqa: PLC0415
        get_moe_layer_wise_logging_tracker,
    )

    for entry in get_moe_layer_wise_logging_tracker().values():
        entry["values"].fill_(9)


def dirty_evaluation(job):
    for chunk in job.chunks:
        chunk.eval()


def dirty_freezing(job):
    from megatron_moevement.integrations.megatron.freezing import Freezing  # noqa: PLC0415

    freezing = Freezing(job.chunks, job.optimizer)
    freezing.set_active(frozenset(list(freezing.operators)[:1]))  # and is interrupted


def dirty_groups(job):
    for chunk in job.chunks:
        chunk.bucket_groups = chunk.bucket_groups[1:]
        chunk.expert_parallel_bucket_groups = []


def dirty_wanted_gradients(job):
    from megatron_moevement.integrations.megatron import freezing  # noqa: PLC0415

    (embedding,) = modules(job, "LanguageModelEmbedding")
    embedding.register_forward_hook(freezing._want_gradient)
    for layer in modules(job, "TransformerLayer"):
        layer.register_forward_pre_hook(freezing._want_gradient_of_input, with_kwargs=True)


def dirty_hooks(job):
    for chunk in job.chunks:
        chunk.disable_forward_pre_hook(param_sync=False)


DIRT = {
    name.removeprefix("dirty_"): function
    for name, function in list(globals().items())
    if name.startswith("dirty_")
}


def train(flags, dirt, reset):
    """Trains two steps, is dirtied, trains one more; returns digest, ledger, auxiliary losses."""
    from megatron_moevement.integrations.megatron.random_state import (  # noqa: PLC0415
        random_state,
        restore_random_state,
    )
    from megatron_moevement.integrations.megatron.transients import Transients  # noqa: PLC0415
    from megatron_moevement.training.steps import build_datasets, open_steps  # noqa: PLC0415

    with tiny_job(*flags) as job, open_steps(job, build_datasets(job), START) as step:
        step.run(StopRequest.NONE)
        transients = Transients(job.chunks, job.optimizer, job.expert_bias, job.router_counts)
        step.run(StopRequest.NONE)
        job.metrics.collect(1)
        before = random_state()
        if dirt is not None:
            DIRT[dirt](job)
        if reset:
            transients.reset()
        restore_random_state(before)
        try:
            step.run(StopRequest.NONE)
        except Exception as error:  # noqa: BLE001  (without the reset anything may happen)
            return repr(error)
        return [job.digests(), job.optimizer.scalers(), job.metrics.collect(1)]


@pytest.fixture(scope="module")
def result_of(megatron_fork_server):
    """Returns what a function returned on one rank; the same call is made once."""

    @functools.cache
    def run(function, flags, *rest):
        arguments = [list(flags), *rest]
        return megatron_fork_server.run(function, world_size=1, args=arguments).check().values[0]

    return run


def transients_of(job):
    """Returns each transient in a form that can be compared."""
    from megatron.core.tensor_parallel import random  # noqa: PLC0415
    from megatron.core.transformer.moe.moe_utils import (  # noqa: PLC0415
        get_moe_layer_wise_logging_tracker,
    )

    every_module = [each for chunk in job.chunks for each in chunk.modules()]
    every_parameter = [each for chunk in job.chunks for each in chunk.parameters()]
    buffers = [
        each for chunk in job.chunks for each in chunk.buffers + chunk.expert_parallel_buffers
    ]
    masters = [
        master
        for part in job.optimizer.parts
        for group in part.optimizer.param_groups
        for master in group["params"]
    ]
    config, ddp_config = job.chunks[0].config, job.chunks[0].ddp_config
    found = {
        "tracker": random.get_cuda_rng_tracker()._current_state_name,
        "recomputation": random.IS_CHECKPOINTING,
        "training": [each.training for each in every_module],
        "expert_bias": job.expert_bias._pending,
        "router_counts": job.router_counts._step.tolist(),
        "metrics": [
            entry["values"].tolist() for entry in get_moe_layer_wise_logging_tracker().values()
        ],
        "force": [chunk.force_all_reduce for chunk in job.chunks],
        "grad": [each.grad is None for each in every_parameter],
        "added": [each.grad_added_to_main_grad for each in every_parameter],
        "trained": [each.requires_grad for each in every_parameter],
        "buffers": [bool(each.grad_data.any()) for each in buffers],
        "masters": [each.grad is None for each in masters],
        "scalers": [part.grad_scaler._noted for part in job.optimizer.parts],
        "frozen": job.optimizer._frozen,
        "gathers_ahead": [len(each._forward_pre_hooks) for each in every_module],
        "gather_handles": [len(chunk.remove_forward_pre_hook_handles) for chunk in job.chunks],
        "wanted_gradients": [len(each._forward_hooks) for each in every_module],
        "groups": bucket_groups(job),
    }
    found |= {name: getattr(config, name) for name in FUNCTIONS}
    found |= {name: getattr(ddp_config, name) for name in OVERLAPS}
    for name in ROUTER_COUNTERS:
        found[name] = [getattr(router, name).tolist() for router in modules(job, "TopKRouter")]
    for name in OF_A_BUCKET_GROUP:
        found[name] = [getattr(group, name) for group in bucket_groups(job)]
    return found


def put_back(flags):
    """Returns, for each dirt, what it made dirty, and what is dirty behind the reset."""
    from megatron_moevement.integrations.megatron.random_state import (  # noqa: PLC0415
        random_state,
        restore_random_state,
    )
    from megatron_moevement.integrations.megatron.transients import Transients  # noqa: PLC0415
    from megatron_moevement.training.steps import build_datasets, open_steps  # noqa: PLC0415

    with tiny_job(*flags) as job, open_steps(job, build_datasets(job), START) as step:
        step.run(StopRequest.NONE)
        transients = Transients(job.chunks, job.optimizer, job.expert_bias, job.router_counts)
        job.metrics.collect(1)
        streams = random_state()
        transients.reset()
        clean = transients_of(job)
        found = {}
        for name, dirty in DIRT.items():
            dirty(job)
            before = transients_of(job)
            transients.reset()
            restore_random_state(streams)
            after = transients_of(job)
            found[name] = [
                [key for key in clean if seen[key] != clean[key]] for seen in (before, after)
            ]
        return [sorted(clean), found]


def test_each_dirt_is_seen_and_put_back(result_of):
    names, found = result_of(put_back, SHARDED)
    assert {dirt: left for dirt, (_, left) in found.items() if left} == {}
    assert [dirt for dirt, (seen, _) in found.items() if not seen] == []
    assert {key for seen, _ in found.values() for key in seen} == set(names)


@pytest.mark.parametrize("dirt", slow_but(("handles", "freezing", "random_streams"), DIRT))
def test_a_reset_leaves_nothing_of_the_dirt(result_of, dirt):
    flags = SHARDED if dirt in OF_GATHERS_AHEAD else FLAGS
    assert result_of(train, flags, dirt, True) == result_of(train, flags, None, True)


@pytest.mark.parametrize("dirt", ["handles", "schedule_functions", "router_counters", "metrics"])
def test_without_the_reset_the_next_step_shows_the_dirt(result_of, dirt):
    """The rest is overwritten by a step that begins, or shows when that one is interrupted."""
    assert result_of(train, FLAGS, dirt, False) != result_of(train, FLAGS, None, True)


def interrupt(flags, owner, name):
    """Interrupts the third step at a point, puts things back, trains it again."""
    from megatron_moevement.integrations.megatron.random_state import (  # noqa: PLC0415
        random_state,
        restore_random_state,
    )
    from megatron_moevement.integrations.megatron.transients import Transients  # noqa: PLC0415
    from megatron_moevement.training.steps import build_datasets, open_steps  # noqa: PLC0415

    with tiny_job(*flags) as job, open_steps(job, build_datasets(job), START) as step:
        step.run(StopRequest.NONE)
        transients = Transients(job.chunks, job.optimizer, job.expert_bias, job.router_counts)
        step.run(StopRequest.NONE)
        if owner is not None:
            before, batches = random_state(), step.micro_batches()
            step.micro_batches, fetch = lambda: batches, step.micro_batches
            place = {"chunk": job.chunks[0].module, "barrier": job.barrier, "job": job.optimizer}
            original = getattr(place[owner], name)
            setattr(place[owner], name, fail)
            try:
                step.run(StopRequest.NONE)
            except OnPurposeError as error:
                del error
            gc.collect()
            setattr(place[owner], name, original)
            transients.reset()
            restore_random_state(before)
            step.run(StopRequest.NONE)
            step.micro_batches = fetch
        else:
            step.run(StopRequest.NONE)
        step.run(StopRequest.NONE)
        return [job.digests(), job.optimizer.scalers(), job.ledger.losses()]


@pytest.mark.parametrize(
    ("owner", "name"), [("chunk", "forward"), ("barrier", "wait"), ("job", "prepare")]
)
@pytest.mark.parametrize("flags", [FLAGS, SHARDED], ids=["replicated", "sharded"])
def test_an_interrupted_step_is_trained_again_with_the_same_bits(result_of, flags, owner, name):
    assert result_of(interrupt, flags, owner, name) == result_of(interrupt, flags, None, "")
