# SPDX-License-Identifier: Apache-2.0
"""Checkpoints go to Megatron-LM and come from it: its folders, keys and arguments, every tensor."""

import os
import pickle
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron_moevement.runtime.observation.events import EventName, read_events
from megatron_moevement.training.checkpoint_arguments import network_in
from megatron_moevement.training.program import main
from tests.harness.checkpoint_tensors import tensors_in
from tests.harness.tiny_job import TINY

pytestmark = pytest.mark.distributed

SAVED_AT = 3
FLAGS = (
    "--num-layers=4",
    "--vocab-size=95",
    "--make-vocab-size-divisible-by=16",
    "--moe-aux-loss-coeff=0.0",
    "--moe-grouped-gemm",
    "--global-batch-size=8",
    "--train-iters=5",
    "--bf16",
    "--moe-router-dtype=fp32",
)
DISTRIBUTED, OVERLAP = "--use-distributed-optimizer", "--overlap-grad-reduce"
LAYOUTS = {
    "one": (1,),
    "DP2": (2,),
    "PP2 x EP2": (4, "--pipeline-model-parallel-size=2", "--expert-model-parallel-size=2"),
    "TP2": (2, "--tensor-model-parallel-size=2", "--sequence-parallel"),
    "EP2": (2, "--expert-model-parallel-size=2"),
    "PP2": (2, "--pipeline-model-parallel-size=2"),
    "VPP2": (2, "--pipeline-model-parallel-size=2", "--num-virtual-stages-per-pipeline-rank=2"),
}
RESHARDABLE, BY_BUCKETS = "fully_reshardable", "dp_reshardable"


# What follows names keys and folders as megatron/training/checkpointing.py of core_v0.16.1 does.


def path_in(root, iteration):
    return Path(root) / f"iter_{iteration:07d}"


def tracked(root):
    return int((Path(root) / "latest_checkpointed_iteration.txt").read_text().strip())


def megatrons_state(job, args, iteration, metadata, *, is_loading, with_optimizer=True):
    """Returns the state that Megatron-LM saves, or asks for."""
    from megatron.core.utils import unwrap_model  # noqa: PLC0415  (needs the backend)

    from megatron_moevement.integrations.megatron import (  # noqa: PLC0415
        megatron_checkpoint,
    )

    state = {"args": args, "checkpoint_version": 3.0, "iteration": iteration}
    chunks = unwrap_model(list(job.chunks))
    names = ["model"] if len(chunks) == 1 else [f"model{k}" for k in range(len(chunks))]
    for name, chunk in zip(names, chunks, strict=True):
        state[name] = chunk.sharded_state_dict(metadata=metadata)
    if with_optimizer:
        how = {"is_loading": True} if is_loading else {}
        state["optimizer"] = job.optimizer.megatron.sharded_state_dict(
            state, metadata=metadata, **how
        )
        state["opt_param_scheduler"] = job.scheduler.state_dict()
    state["rng_state"] = megatron_checkpoint.sharded_random_state(is_loading=is_loading)
    state["num_floating_point_operations_so_far"] = 0
    return state


def megatrons_metadata(args, kind):
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if args.use_distributed_optimizer:
        metadata["distrib_optim_sharding_type"] = kind
        if kind == RESHARDABLE:
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    return metadata


def megatron_saves(job, root, iteration, kind=RESHARDABLE):
    """Saves as Megatron-LM does; its arguments are those of the job's flags."""
    from megatron.core import dist_checkpointing  # noqa: PLC0415  (needs the backend)
    from megatron.core.transformer.enums import AttnBackend  # noqa: PLC0415

    from megatron_moevement.training.megatron_arguments import (  # noqa: PLC0415
        megatron_arguments,
    )

    args = Namespace(**megatron_arguments(job.arguments))
    vars(args).update(
        consumed_train_samples=iteration * job.batches.global_batch_size,
        attention_backend=AttnBackend.auto,
        save=root,
        params_dtype=torch.bfloat16,
    )
    job.optimizer.complete_parameters()
    metadata = megatrons_metadata(args, kind)
    state = megatrons_state(job, args, iteration, metadata, is_loading=False)
    path = path_in(root, iteration)
    if torch.distributed.get_rank() == 0:
        path.mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save(state, str(path), content_metadata=metadata)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (Path(root) / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def megatron_loads(job, root, with_optimizer):
    """Loads as Megatron-LM does, and returns its iteration and consumed samples."""
    from megatron.core import dist_checkpointing  # noqa: PLC0415  (needs the backend)
    from megatron.core.utils import unwrap_model  # noqa: PLC0415

    from megatron_moevement.training.megatron_arguments import (  # noqa: PLC0415
        megatron_arguments,
    )

    path = str(path_in(root, tracked(root)))
    assert dist_checkpointing.check_is_distributed_checkpoint(path)
    common = dist_checkpointing.load_common_state_dict(path)
    saved, args = common["args"], Namespace(**megatron_arguments(job.arguments))
    assert common["checkpoint_version"] == 3.0
    for name in ("num_layers", "hidden_size", "num_attention_heads", "add_position_embedding"):
        assert getattr(saved, name) == getattr(args, name), name
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    same = all(
        getattr(saved, f"{axis}_model_parallel_size")
        == getattr(args, f"{axis}_model_parallel_size")
        for axis in ("tensor", "pipeline")
    )
    request = megatrons_state(job, args, 1, metadata, is_loading=True)
    for name in ("args", "checkpoint_version", "iteration", "num_floating_point_operations_so_far"):
        del request[name]
    if not same or saved.no_save_rng:
        del request["rng_state"]
    scheduler = request.pop("opt_param_scheduler", None)
    state = dist_checkpointing.load(request, path, strict="assume_ok_unexpected")
    chunks = unwrap_model(list(job.chunks))
    names = ["model"] if len(chunks) == 1 else [f"model{k}" for k in range(len(chunks))]
    for name, chunk in zip(names, chunks, strict=True):
        chunk.load_state_dict(state[name], strict=True)
    if with_optimizer:
        job.optimizer.megatron.load_state_dict(state["optimizer"])
        assert state["opt_param_scheduler"].keys() == scheduler.keys()
        job.scheduler.load_state_dict(state["opt_param_scheduler"])
    else:
        job.optimizer.megatron.reload_model_params()
    return state["iteration"], state["args"].consumed_train_samples


# The ranks of a job.


def load_as_megatron_and_save_as_megatron(flags, source, target, with_optimizer):
    from tests.harness.tiny_job import tiny_job  # noqa: PLC0415  (needs the backend)

    with tiny_job(*flags, "--seed=4321") as job:
        taken = megatron_loads(job, source, with_optimizer)
        megatron_saves(job, target, taken[0])
        return [*taken, job.optimizer.adam_step(), job.scheduler.state_dict()["num_steps"]]


def load_ours_and_save_as_megatron(flags, source, target, kind):
    from tests.harness.tiny_job import tiny_job  # noqa: PLC0415  (needs the backend)

    with tiny_job(*flags, f"--load={source}") as job:
        common = job.checkpoints.resume(lambda _: None)
        megatron_saves(job, target, common["progress"]["committed"], kind)


def train(argv):
    return int(main([*TINY, *argv]))


class Trainer:
    """Runs the program and reads what it reports."""

    def __init__(self, server, folder):
        self.server, self.folder, self.runs = server, folder, 0

    def attempt(self, layout, *flags):
        """Returns what the ranks returned and rank 0's standard error, and the losses."""
        world_size, *parallel = LAYOUTS[layout]
        events = self.folder / f"events{self.runs}"
        self.runs += 1
        argv = [*FLAGS, *parallel, *flags, f"--moevement-event-dir={events}"]
        result = self.server.run(train, world_size=world_size, args=[argv], timeout_s=200).check()
        losses = {}
        if events.exists():
            losses = {
                record.iteration: record.fields["loss"]
                for record in read_events(events)
                if record.event is EventName.ITERATION and "loss" in record.fields
            }
        return set(result.values), "".join(rank.stderr for rank in result.ranks), losses

    def run(self, layout, *flags):
        codes, told, losses = self.attempt(layout, *flags)
        assert codes == {0}, told
        return losses

    def ranks(self, layout, function, *args, flags=()):
        world_size, *parallel = LAYOUTS[layout]
        every = [[*FLAGS, *parallel, *flags], *args]
        return self.server.run(function, world_size=world_size, args=every, timeout_s=200).check()


@pytest.fixture(scope="module")
def trainer(megatron_fork_server, tmp_path_factory):
    return Trainer(megatron_fork_server, tmp_path_factory.mktemp("megatron"))


@pytest.fixture(scope="module")
def ours(trainer):
    """Returns a checkpoint of ours by layout and further flags."""
    made = {}

    def of(layout, *flags):
        key = (layout, *flags)
        if key not in made:
            made[key] = trainer.folder / f"ours{len(made)}"
            trainer.run(layout, *flags, f"--save={made[key]}", f"--exit-interval={SAVED_AT}")
        return made[key]

    return of


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("before", "after", "flags", "with_optimizer"),
    [
        pytest.param("EP2", "EP2", (DISTRIBUTED,), True, marks=SLOW),
        ("PP2", "VPP2", (DISTRIBUTED,), True),
        pytest.param("TP2", "PP2", (), True, marks=SLOW),
        # Megatron-LM numbers its optimizers: experts of a group of their own have one of their own
        ("EP2", "TP2", (DISTRIBUTED,), False),
        pytest.param("PP2 x EP2", "EP2", (DISTRIBUTED,), True, marks=SLOW),
        pytest.param("PP2 x EP2", "TP2", (), False, marks=SLOW),
    ],
)
def test_megatron_lm_loads_what_is_saved_here(before, after, flags, with_optimizer, ours, trainer):
    """And saves the same tensors: weights, masters and moments, under the same names."""
    source, target = ours(before, *flags), trainer.folder / f"theirs {before} {after}"
    args = (str(source), str(target), with_optimizer)
    result = trainer.ranks(after, load_as_megatron_and_save_as_megatron, *args, flags=flags)
    place = [SAVED_AT, 8 * SAVED_AT]
    expected = [*place, *(place if with_optimizer else [0, 0])]
    assert result.values == (expected,) * LAYOUTS[after][0]
    saved, loaded = (tensors_in(path_in(root, SAVED_AT)) for root in (source, target))
    assert any(name.startswith("optimizer.state.exp_avg_sq.") for name in saved)
    assert saved.keys() == loaded.keys()
    compared = [name for name in saved if with_optimizer or not name.startswith("optimizer.")]
    assert [name for name in compared if not torch.equal(saved[name], loaded[name])] == []


@pytest.mark.parametrize(
    ("before", "after", "flags", "kind"),
    [
        ("EP2", "TP2", (DISTRIBUTED,), RESHARDABLE),
        pytest.param("TP2", "PP2", (), RESHARDABLE, marks=SLOW),
        pytest.param("PP2 x EP2", "VPP2", (DISTRIBUTED,), RESHARDABLE, marks=SLOW),
        ("EP2", "EP2", (DISTRIBUTED,), BY_BUCKETS),
        pytest.param("PP2 x EP2", "PP2 x EP2", (DISTRIBUTED, OVERLAP), BY_BUCKETS, marks=SLOW),
        pytest.param("VPP2", "VPP2", (DISTRIBUTED,), BY_BUCKETS, marks=SLOW),
        pytest.param("DP2", "one", (DISTRIBUTED,), BY_BUCKETS, marks=SLOW),
        pytest.param("one", "DP2", (DISTRIBUTED,), BY_BUCKETS, marks=SLOW),
    ],
)
def test_training_goes_on_from_what_megatron_lm_saved(before, after, flags, kind, ours, trainer):
    source, theirs = ours(before, *flags), trainer.folder / f"from {before} {after} {kind}"
    args = (str(source), str(theirs), kind)
    trainer.ranks(before, load_ours_and_save_as_megatron, *args, flags=flags)
    digests = [trainer.folder / f"{theirs.name} {name}" for name in ("expected", "found")]
    digest = [f"--moevement-state-digest={file}" for file in digests]
    expected = trainer.run(after, *flags, f"--load={source}", digest[0])
    codes, told, found = trainer.attempt(after, *flags, f"--load={theirs}", digest[1])
    assert codes == {0}, told
    assert (
        "is Megatron-LM's: taken are the weights, the optimizer's state and the schedules, " in told
    )
    assert f"iteration {SAVED_AT} and {8 * SAVED_AT} consumed samples" in told
    assert found == expected
    assert set(found) == {SAVED_AT + 1, SAVED_AT + 2}


@pytest.fixture(scope="module")
def theirs(ours, trainer):
    """Returns a checkpoint of Megatron-LM by layout, flags, and changed arguments."""
    made = {}

    def of(layout, *flags, kind=RESHARDABLE, **changed):
        key = (layout, *flags, kind, *changed.items())
        if key not in made:
            made[key] = trainer.folder / f"theirs{len(made)}"
            args = (str(ours(layout, *flags)), str(made[key]), kind)
            trainer.ranks(layout, load_ours_and_save_as_megatron, *args, flags=flags)
            file = path_in(made[key], SAVED_AT) / "common.pt"
            common = torch.load(file, weights_only=False)  # of our own
            vars(common["args"]).update(changed)
            torch.save(common, file)
        return made[key]

    return of


def test_weights_alone_are_taken_where_the_optimizers_state_does_not_fit(theirs, trainer):
    """The message says in which form it is, and what to do."""
    folder = theirs("EP2", DISTRIBUTED, kind=BY_BUCKETS)
    for layout in ("one", "TP2"):
        codes, told, _ = trainer.attempt(layout, DISTRIBUTED, f"--load={folder}")
        assert codes == {2}
        assert "lies in other buckets than here (dp_reshardable): give --no-load-optim" in told
    flags = ("--no-load-optim", "--override-opt-param-scheduler", f"--load={folder}")
    codes, told, losses = trainer.attempt("one", *flags)
    assert (codes, set(losses)) == ({0}, {SAVED_AT + 1, SAVED_AT + 2}), told
    assert "taken are the weights, iteration 3 and 24 consumed samples; not taken are" in told
    first = trainer.run("one", "--finetune", f"--load={folder}")
    assert set(first) == {1, 2, 3, 4, 5}
    assert first[1] != losses[SAVED_AT + 1]


@pytest.mark.parametrize(
    ("flags", "changed", "told"),
    [
        (("--hidden-size=64",), {}, "of another model: --hidden-size 64 (checkpoint: 32)"),
        ((), {"mtp_num_layers": 1}, "of a model that is not covered: mtp_num_layers=1"),
        ((), {"num_layers": None}, "has no description of its model"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(flags, changed, told, theirs, trainer):
    folder = theirs("one", **changed)
    codes, stderr, _ = trainer.attempt("one", *flags, f"--load={folder}")
    assert (codes, told in stderr) == ({2}, True), stderr


def test_no_weight_of_a_checkpoint_is_passed_over(theirs, trainer):
    """Here it does not tell of a weight that it has."""
    untied = "--untie-embeddings-and-output-weights"
    folder = theirs("one", untied, untie_embeddings_and_output_weights=False)
    codes, stderr, _ = trainer.attempt("one", f"--load={folder}")
    assert (codes, "this model has no weight output_layer.weight;" in stderr) == ({2}, True), stderr


def test_a_converters_weights_are_taken_as_the_first_ones(theirs, trainer):
    source, folder = theirs("one"), trainer.folder / "release"
    folder.mkdir()
    shutil.copytree(path_in(source, SAVED_AT), folder / "release")
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    found = trainer.run("one", f"--load={folder}")
    assert found == trainer.run("one", f"--load={source}", "--finetune")


def test_the_network_of_megatron_lms_checkpoint_needs_no_flags(theirs):
    told = network_in(str(theirs("one")), None)
    assert (told["num_layers"], told["hidden_size"], told["num_experts"]) == (4, 32, 4)
    assert told["disable_bias_linear"] is True


class Planted:
    """Runs a command where it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (self.file,)


@pytest.mark.parametrize("place", [".metadata", "common.pt"])
def test_nothing_in_a_checkpoint_is_run(place, theirs, trainer, tmp_path):
    folder, struck = tmp_path / "planted", tmp_path / "struck"
    shutil.copytree(theirs("one"), folder)
    file = path_in(folder, SAVED_AT) / place
    if place == ".metadata":
        file.write_bytes(pickle.dumps(Planted(str(struck))))
    else:
        torch.save({**torch.load(file, weights_only=False), "more": Planted(str(struck))}, file)
    codes, told, _ = trainer.attempt("one", f"--load={folder}")
    assert codes == {2}, told
    assert not struck.exists()
