# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of PP2 x EP2 goes on in any other layout, with the same losses."""

import math
import shutil
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
    "--vocab-size=95",  # with the end of document 96 rows, whatever TP: padding counts in the loss
    "--make-vocab-size-divisible-by=16",
    "--moe-aux-loss-coeff=0.0",  # computed from the tokens of a rank, so it depends on the layout
    "--moe-grouped-gemm",
    "--global-batch-size=8",
    "--train-iters=5",
    "--eval-interval=5",
    "--eval-iters=1",
)
PP2_EP2 = ("--pipeline-model-parallel-size=2", "--expert-model-parallel-size=2")
DISTRIBUTED = "--use-distributed-optimizer"
OF_THE_NETWORK = (
    *("--model-preset", "--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-experts"),
    *("--moe-ffn-hidden-size", "--moe-grouped-gemm"),
)
"""Of the flags above."""

LAYOUTS = {
    "one rank": (1,),
    "one rank, sequential experts": (1,),
    "TP2": (2, "--tensor-model-parallel-size=2", "--sequence-parallel"),
    "DP2": (2,),
    "DP2, distributed optimizer": (2, DISTRIBUTED),
    "VPP2": (
        2,
        "--pipeline-model-parallel-size=2",
        "--num-virtual-stages-per-pipeline-rank=2",
    ),
    "EP2": (2, "--expert-model-parallel-size=2"),
    "EP4": (4, "--expert-model-parallel-size=4"),
    "EP2, distributed optimizer": (2, "--expert-model-parallel-size=2", DISTRIBUTED),
    "PP2 x EP2 as it was": (4, *PP2_EP2),
}


def mostly_slow(layouts, fast):
    """Returns parameters of which only `fast` are in the default run."""
    return [
        layout if layout in fast else pytest.param(layout, marks=pytest.mark.slow)
        for layout in layouts
    ]


def train(argv):
    return int(main([*TINY, *argv]))


class Trainer:
    """Runs the program and reads what it reports."""

    def __init__(self, server, folder):
        self.server, self.folder, self.runs = server, folder, 0

    def run(self, world_size, *flags, program=train):
        """Returns the losses of iterations and of the evaluation."""
        events = self.folder / f"events{self.runs}"
        self.runs += 1
        argv = [*flags, f"--moevement-event-dir={events}"]
        result = self.server.run(program, world_size=world_size, args=[argv], timeout_s=60).check()
        assert result.values == (0,) * world_size
        return {
            (record.event, record.iteration): record.fields["loss"]
            for record in read_events(events)
            if record.event in (EventName.ITERATION, EventName.EVALUATION)
            and "loss" in record.fields
        }

    def resume(self, source, world_size, *flags):
        return self.run(world_size, *flags, f"--load={source}")


@pytest.fixture(scope="module")
def trainer(megatron_fork_server, tmp_path_factory):
    return Trainer(megatron_fork_server, tmp_path_factory.mktemp("resharding"))


def saved_with(trainer, name, *flags):
    folder = trainer.folder / name
    trainer.run(4, *FLAGS, *PP2_EP2, *flags, f"--save={folder}", f"--exit-interval={SAVED_AT}")
    return folder, trainer.resume(folder, 4, *FLAGS, *PP2_EP2, *flags)


@pytest.fixture(scope="module")
def plain(trainer):
    """A checkpoint without the distributed optimizer, and the losses that follow in its layout."""
    return saved_with(trainer, "plain")


@pytest.fixture(scope="module")
def sharded(trainer):
    """The same with the distributed optimizer."""
    return saved_with(trainer, "sharded", DISTRIBUTED)


def agrees(found, expected):
    """Asserts that the next iterations and the evaluation have the losses of the old layout."""
    assert {iteration for _, iteration in found} == {SAVED_AT + 1, SAVED_AT + 2}
    assert len({round(loss, 4) for loss in expected.values()}) == len(expected)
    assert found == pytest.approx(expected, rel=1e-5)


def flags_of(layout):
    world_size, *parallel = LAYOUTS[layout]
    flags = [flag for flag in FLAGS if flag != "--moe-grouped-gemm" or "sequential" not in layout]
    return world_size, [*flags, *parallel]


@pytest.mark.parametrize(
    "layout",
    mostly_slow(
        LAYOUTS,
        {"TP2", "VPP2", "EP2, distributed optimizer"},
    ),
)
def test_a_checkpoint_goes_on_in_another_layout(layout, plain, trainer):
    folder, expected = plain
    world_size, flags = flags_of(layout)
    agrees(trainer.resume(folder, world_size, *flags), expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one rank", "DP2", "DP2, distributed optimizer", "EP4"])
def test_a_checkpoint_of_the_distributed_optimizer_goes_on_with_and_without(
    layout, sharded, trainer
):
    folder, expected = sharded
    world_size, flags = flags_of(layout)
    agrees(trainer.resume(folder, world_size, *flags), expected)


@pytest.mark.parametrize(
    ("before", "after"),
    [((), (DISTRIBUTED,)), pytest.param((DISTRIBUTED,), (), marks=pytest.mark.slow)],
    ids=["on", "off"],
)
@pytest.mark.parametrize(
    "precision",
    [(), ("--bf16", "--moe-router-dtype=fp32")],
    ids=["fp32", "bf16"],
)
@pytest.mark.slow
def test_master_weights_outlive_a_change_of_the_optimizer(precision, before, after, trainer):
    """BF16 weights alone would give other losses: updates are smaller than their last bit."""
    folder = trainer.folder / f"masters-{len(precision)}-{len(before)}"
    flags = (*FLAGS, *precision, "--lr=1e-4")
    trainer.run(2, *flags, *before, f"--save={folder}", f"--exit-interval={SAVED_AT}")
    expected = trainer.resume(folder, 2, *flags, *before)
    assert trainer.resume(folder, 2, *flags, *after) == expected


@pytest.mark.slow
def test_sequential_and_grouped_experts_share_their_checkpoints(trainer):
    """The other way round: sequential experts save, grouped ones go on."""
    folder = trainer.folder / "sequential"
    sequential = [flag for flag in FLAGS if flag != "--moe-grouped-gemm"]
    trainer.run(1, *sequential, f"--save={folder}", f"--exit-interval={SAVED_AT}")
    expected = trainer.resume(folder, 1, *sequential)
    agrees(trainer.resume(folder, 1, *FLAGS), expected)


def load_and_save(flags, source, target):
    """Saves what is loaded, without a step between."""
    from tests.harness.tiny_job import tiny_job  # noqa: PLC0415  (needs the backend)

    with tiny_job(*flags, f"--load={source}") as job:
        job.checkpoints.resume(lambda _: None)
        job.durable.save(Path(target), {})


PADDED = (
    *(flag for flag in FLAGS if not flag.startswith(("--vocab-size", "--make-vocab-size"))),
    "--tokenizer-type=ByteTokenizer",
    "--vocab-size=257",
    "--bf16",
    DISTRIBUTED,
)
ROWS = {"one rank": 320, "TP2": 384}  # of 257 ids: a multiple of 64 x TP


@pytest.mark.parametrize(
    ("before", "after"),
    [("one rank", "TP2"), ("TP2", "one rank")],
)
@pytest.mark.slow
def test_the_rows_of_the_vocabulary_outlive_another_padding(before, after, trainer):
    source, target = (trainer.folder / f"padded {before} {name}" for name in ("saved", "loaded"))
    (world_size, *parallel), (new_world_size, *new_parallel) = LAYOUTS[before], LAYOUTS[after]
    save = (f"--save={source}", f"--exit-interval={SAVED_AT}")
    trainer.run(world_size, *PADDED, *parallel, *save)
    flags = [*PADDED, *new_parallel]
    target.mkdir()
    trainer.server.run(
        load_and_save, world_size=new_world_size, args=[flags, str(source), str(target)]
    ).check()
    saved, loaded = tensors_in(source / f"iter_{SAVED_AT:07d}"), tensors_in(target)
    kept = min(ROWS.values())
    embedding = [name for name in saved if name.endswith("embedding.word_embeddings.weight")]
    assert len(embedding) == 4  # tied: weight, master weight, two moments, and no output layer
    for name in embedding:
        assert (len(saved[name]), len(loaded[name])) == (ROWS[before], ROWS[after])
        assert saved[name][:257].abs().sum(dim=1).all()
        assert torch.equal(loaded[name][:kept], saved.pop(name)[:kept])
        assert not loaded.pop(name)[kept:].any()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    losses = trainer.resume(source, new_world_size, *flags)
    assert {iteration for _, iteration in losses} == {SAVED_AT + 1, SAVED_AT + 2}
    assert all(math.isfinite(loss) for loss in losses.values())


def test_a_lost_moment_would_be_seen(plain, trainer):
    """The comparison has teeth: without the optimizer's state the losses differ."""
    folder, expected = plain
    found = trainer.resume(folder, 1, *FLAGS, "--no-load-optim", "--override-opt-param-scheduler")
    last = (EventName.ITERATION, SAVED_AT + 2)
    assert found[last] != pytest.approx(expected[last], rel=1e-5)


@pytest.mark.parametrize("part", ["optim", "rng"])
def test_a_checkpoint_without_a_part_is_loaded_without_it_alone(part, trainer):
    whole, lean = trainer.folder / f"whole for {part}", trainer.folder / f"without {part}"
    save = (f"--exit-interval={SAVED_AT}",)
    trainer.run(1, *FLAGS, *save, f"--save={whole}")
    trainer.run(1, *FLAGS, *save, f"--save={lean}", f"--no-save-{part}")
    if part == "optim":
        assert size(lean) < size(whole) / 2
    argv = [*FLAGS, f"--load={lean}"]
    refused = trainer.server.run(train, world_size=1, args=[argv]).check()
    assert refused.values == (2,)
    assert f"was saved with --no-save-{part}: give --no-load-{part}" in refused.ranks[0].stderr
    flags = [*FLAGS, f"--no-load-{part}", "--override-opt-param-scheduler"]
    assert trainer.resume(lean, 1, *flags) == trainer.resume(whole, 1, *flags)


WITHOUT_NETWORK = (
    *(flag for flag in (*TINY, *FLAGS) if not flag.startswith(OF_THE_NETWORK)),
    "--attention-dropout=0",
    "--hidden-dropout=0",
    "--override-opt-param-scheduler",
)


def test_the_network_of_a_checkpoint_needs_no_flags(trainer):
    """A flag that is given counts, and another model is refused as ever."""
    folder = trainer.folder / "network"
    trainer.run(1, *FLAGS, f"--save={folder}", f"--exit-interval={SAVED_AT}")
    expected = trainer.resume(folder, 1, *FLAGS, "--override-opt-param-scheduler")
    flags = (*WITHOUT_NETWORK, f"--load={folder}", "--use-checkpoint-args")
    assert trainer.run(1, *flags, program=main) == expected
    other = [*flags, "--hidden-size=64"]
    refused = trainer.server.run(main, world_size=1, args=[other]).check()
    assert refused.values == (2,)
    assert "--hidden-size 64 (checkpoint: 32)" in refused.ranks[0].stderr


def test_a_folder_without_a_checkpoint_says_nothing_of_the_network(tmp_path):
    assert network_in(str(tmp_path), None) == {}


def size(folder):
    return sum(path.stat().st_size for path in folder.rglob("*.distcp"))


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_gives_the_bits_of_a_resume_from_the_one_before(trainer):
    whole, damaged = trainer.folder / "whole", trainer.folder / "damaged"
    save = ("--save-interval=2", "--exit-interval=4", f"--save={whole}")
    trainer.run(2, *FLAGS, *save)
    shutil.copytree(whole, damaged)
    tensors = next((damaged / "iter_0000004").glob("*.distcp"))
    data = bytearray(tensors.read_bytes())
    data[len(data) // 2] ^= 1
    tensors.write_bytes(data)

    digests = [trainer.folder / name for name in ("expected.json", "found.json")]
    trainer.resume(whole, 2, *FLAGS, "--ckpt-step=2", f"--moevement-state-digest={digests[0]}")
    argv = [*FLAGS, f"--load={damaged}", f"--moevement-state-digest={digests[1]}"]
    result = trainer.server.run(train, world_size=2, args=[argv]).check()

    told = "".join(rank.stderr for rank in result.ranks)
    assert len(told.splitlines()) == 1, told
    assert str(damaged / "iter_0000004") in told
    assert f"{tensors.name} is damaged" in told
    assert Path(digests[0]).read_bytes() == Path(digests[1]).read_bytes()


def test_a_folder_of_damaged_checkpoints_only_is_refused(trainer):
    folder = trainer.folder / "ruined"
    trainer.run(1, *FLAGS, f"--save={folder}", "--exit-interval=1")
    (folder / "moevement" / "iter_0000001.json").unlink()
    result = trainer.server.run(
        train, world_size=2, args=[[*FLAGS, f"--load={folder}"]], timeout_s=60
    ).check()
    assert result.values == (2, 2)
    lines = "".join(rank.stderr for rank in result.ranks).splitlines()
    assert ["not usable" in lines[0], "none of its 1 checkpoints is whole" in lines[1]] == [
        True
    ] * 2
    assert len(lines) == 2
