"""What crosses a stage boundary is logged under its name, changes no bit, and can be replayed."""

import contextlib

import pytest
import torch.distributed as dist

from megatron_moevement.runtime.progress import START
from megatron_moevement.testing.tiny_job import tiny_job

pytestmark = pytest.mark.distributed

UNTIED = "--untie-embeddings-and-output-weights"
PP2 = "--pipeline-model-parallel-size=2"
PP3 = "--pipeline-model-parallel-size=3"
EP2 = "--expert-model-parallel-size=2"
VPP2 = "--num-virtual-stages-per-pipeline-rank=2"
BATCHED = "--no-overlap-p2p-communication"
DROPOUT = ("--attention-dropout=0.1", "--hidden-dropout=0.1")
HALF = ("--fp16", "--initial-loss-scale=16777216", "--loss-scale-window=2", "--hysteresis=1")
BIAS = ("--moe-router-score-function=sigmoid", "--moe-router-enable-expert-bias")
SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
JOBS = {
    "pp2": (2, [PP2, "--bf16", *BIAS], {}),
    "pp3": (3, [PP3, "--num-layers=3", *DROPOUT], {}),
    "pp2-ep2": (4, [PP2, EP2, *SHARDED, "--bf16", *BIAS, *DROPOUT], {}),
    "pp2-fp16": (2, [PP2, *HALF], {}),
    "tp2-pp2": (4, [PP2, "--tensor-model-parallel-size=2", "--sequence-parallel", *DROPOUT], {}),
    "vpp2-overlapped": (2, [PP2, VPP2, "--num-layers=4", "--bf16", *DROPOUT], {}),
    "vpp2-batched": (3, [PP3, VPP2, "--num-layers=6", BATCHED, "--micro-batch-size=1"], {}),
    "vpp2-flush": (
        2,
        [PP2, VPP2, "--num-layers=4"],
        {"overlap_p2p_comm_warmup_flush": True, "microbatch_group_size_per_vp_stage": 3},
    ),
    "shapes": (3, [PP3, "--num-layers=3"], {"variable_seq_lengths": True}),
}
"""Ranks, flags, and what is set in Megatron's config beyond the flags."""
SIZES = {
    "pp2": (2, 1, 6),
    "pp3": (3, 1, 6),
    "pp2-ep2": (2, 1, 3),
    "pp2-fp16": (2, 1, 6),
    "tp2-pp2": (2, 1, 6),
    "vpp2-overlapped": (2, 2, 6),
    "vpp2-batched": (3, 2, 12),
    "vpp2-flush": (2, 2, 6),
    "shapes": (3, 1, 6),
}
"""Stages, chunks of each, micro-batches."""
SAVED_AT, LAST = 2, 5
TIMEOUT_S = 240.0


@contextlib.contextmanager
def boundary_run(flags, config, max_steps=LAST):
    from megatron_moevement.testing.boundary_run import BoundaryRun  # noqa: PLC0415
    from megatron_moevement.training.steps import build_datasets, open_steps  # noqa: PLC0415

    with (
        tiny_job(*flags, UNTIED, "--clip-grad=0.1") as job,
        open_steps(job, build_datasets(job), START) as step,
    ):
        for name, value in config.items():
            assert hasattr(job.chunks[0].config, name)
            setattr(job.chunks[0].config, name, value)
        yield job, BoundaryRun(job, step, max_steps)


def train_plainly(flags, config):
    with boundary_run(flags, config) as (job, run):
        run.train(LAST + 1)
        return [job.digests(), job.ledger.losses()]


def replay_each_stage(flags, config):
    """Trains with the log on, then replays every stage, one after the other."""
    with boundary_run(flags, config, max_steps=LAST) as (job, run):
        with run.logging():
            run.train(SAVED_AT)
            saved = run.state()
            run.train(LAST - SAVED_AT)
        final = run.state()
        peers = run.peers()
        stage = job.position.pp
        logged = {
            tag: tensor.hash for k in run.log.steps for tag, tensor in run.log.sent(k).items()
        }
        found = {"logged": counts(run), "crossed": crossed(peers), "bystander": 0}
        found["full"] = run.log.used_bytes == run.log.capacity_bytes or run.log.used_bytes
        for replayed in range(job.position.pp_size):
            before = run.passes
            if replayed == stage:
                run.log.clear()
                run.restore(saved)
                checks = run.replay(peers, SAVED_AT + 1, LAST)
                found["passes"] = run.passes - before
                found["unlike"] = run.unlike(final)
                found["verified"] = [check.verified for check in checks]
                found["equal"] = [check.equal for check in checks]
                again = {
                    tag: one.hash for k in run.log.steps for tag, one in run.log.sent(k).items()
                }
                found["relogged"] = again == {
                    tag: one for tag, one in logged.items() if tag.step > SAVED_AT
                }
            dist.barrier()
            if replayed != stage:
                found["bystander"] += run.passes - before
        run.log.drop_before(SAVED_AT + 1)
        with run.logging():
            run.train(1)
        found["after"] = [job.digests(), job.ledger.losses()]
        found["skipped"] = [any(job.ledger[k].found_inf) for k in range(SAVED_AT + 1, LAST + 1)]
        return found


def counts(run):
    """Returns for each step how many tensors were logged in each direction, and received."""
    found = []
    for step in run.log.steps:
        ways = [tag.direction.value for tag in run.log.sent(step)]
        found.append([ways.count("forward"), ways.count("backward"), len(run.log.received(step))])
    return found


def crossed(peers):
    """Returns how many tensors crossed, and how many came in otherwise than they were logged."""
    sent = {tag: one for peer in peers for tag, one in peer.hashes.items()}
    received = {tag: one for peer in peers for tag, one in peer.received.items()}
    unlike = sum(received.get(tag) != sent.get(tag) for tag in sent.keys() | received.keys())
    return [len(sent), unlike]


@pytest.mark.parametrize("name", JOBS)
def test_logging_changes_no_bit_and_a_stage_replays_alone(megatron_fork_server, name):
    ranks, flags, config = JOBS[name]
    stages, chunks, micro_batches = SIZES[name]
    plain, logged = (
        megatron_fork_server.run(
            function, world_size=ranks, args=[list(flags), config], timeout_s=TIMEOUT_S
        )
        .check()
        .values
        for function in (train_plainly, replay_each_stage)
    )
    for rank, (expected, found) in enumerate(zip(plain, logged, strict=True)):
        stage = rank // (ranks // stages)
        assert found["after"] == expected
        forward = micro_batches * (chunks - (stage == stages - 1))
        backward = micro_batches * (chunks - (stage == 0))
        received = micro_batches * (2 * chunks - (stage == 0) - (stage == stages - 1))
        assert found["logged"] == [[forward, backward, received]] * LAST
        boundaries = stages * chunks - 1
        assert found["crossed"] == [2 * boundaries * micro_batches * LAST, 0]
        assert found["unlike"] == []
        assert found["verified"] == [True] * (LAST - SAVED_AT)
        assert found["equal"] == [forward + backward] * (LAST - SAVED_AT)
        assert found["relogged"]
        assert found["passes"] == chunks * micro_batches * (LAST - SAVED_AT)
        assert found["bystander"] == 0
        assert any(found["skipped"]) == (name == "pp2-fp16")
