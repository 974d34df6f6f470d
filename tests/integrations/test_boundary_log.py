# SPDX-License-Identifier: Apache-2.0
"""What crosses a stage boundary is logged under its name, changes no bit, and can be replayed."""

import dataclasses
import importlib

import pytest
import torch.distributed as dist

from tests.harness.boundary_jobs import JOBS, LAST, LENGTH, LENGTHS, SIZES, boundary_run
from tests.harness.default_run import slow_but

pytestmark = pytest.mark.distributed

SAVED_AT = 2
REPLAYED = range(SAVED_AT + 1, LAST + 1)
TIMEOUT_S = 240.0


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
        found["lengths"] = sorted({len(one) for peer in peers for one in peer.sent.values()})
        for replayed in range(job.position.pp_size):
            before = run.passes
            if replayed == stage:
                run.log.clear()
                run.restore(saved)
                checks = run.replay(peers, REPLAYED)
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
        found["skipped"] = [any(job.ledger[k].found_inf) for k in REPLAYED]
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


def expectations(name, rank):
    """Returns what `replay_each_stage` finds on a rank when all is well."""
    ranks, _, _ = JOBS[name]
    stages, chunks, micro_batches = SIZES[name]
    stage = rank // (ranks // stages)
    replayed = LAST - SAVED_AT
    forward = micro_batches * (chunks - (stage == stages - 1))
    backward = micro_batches * (chunks - (stage == 0))
    received = micro_batches * (2 * chunks - (stage == 0) - (stage == stages - 1))
    return {
        "logged": [[forward, backward, received]] * LAST,
        "crossed": [2 * (stages * chunks - 1) * micro_batches * LAST, 0],
        "lengths": LENGTHS.get(name, [LENGTH]),
        "unlike": [],
        "verified": [True] * replayed,
        "equal": [forward + backward] * replayed,
        "relogged": True,
        "passes": chunks * micro_batches * replayed,
        "bystander": 0,
    }


def run_job(server, function, name, *args):
    ranks, flags, config = JOBS[name]
    args = [list(flags), config, *args]
    return server.run(function, world_size=ranks, args=args, timeout_s=TIMEOUT_S).check().values


@pytest.mark.parametrize("name", slow_but(("pp2-ep2",), JOBS))
def test_logging_changes_no_bit_and_a_stage_replays_alone(megatron_fork_server, name):
    plain = run_job(megatron_fork_server, train_plainly, name)
    logged = run_job(megatron_fork_server, replay_each_stage, name)
    for rank, (expected, found) in enumerate(zip(plain, logged, strict=True)):
        assert found.pop("after") == expected
        assert any(found.pop("skipped")) == (name == "pp2-fp16")  # a replayed overflow
        assert found == expectations(name, rank)


def replay_segment(flags, config, first, last):
    """Replays adjacent stages together, which talk to each other and to nobody else."""
    with boundary_run(flags, config) as (job, run):
        with run.logging():
            run.train(SAVED_AT)
            saved = run.state()
            run.train(LAST - SAVED_AT)
        final, peers, passes = run.state(), run.peers(), run.passes
        segment = range(first, last + 1)
        inside = job.position.pp in segment
        checks = []
        if inside:
            # Nothing of what they tell each other may come from a log.
            for peer in peers:
                for tag in list(peer.sent):
                    if {tag.sender % job.position.pp_size, tag.receiver % job.position.pp_size} <= {
                        *segment
                    }:
                        del peer.sent[tag]
            run.log.clear()
            run.restore(saved)
            checks = run.replay(peers, REPLAYED, segment)
        dist.barrier()
        return [inside, run.passes - passes, run.unlike(final), [one.verified for one in checks]]


@pytest.mark.parametrize("segment", [(0, 1), (1, 2)])
@pytest.mark.parametrize("name", slow_but(("pp3",), ["pp3", "vpp2-batched", "shapes"]))
def test_adjacent_stages_replay_as_one_segment(megatron_fork_server, name, segment):
    _, chunks, micro_batches = SIZES[name]
    passes = chunks * micro_batches * len(REPLAYED)
    found = run_job(megatron_fork_server, replay_segment, name, *segment)
    for stage, rank in enumerate(found):
        inside = stage in segment
        assert rank == [inside, passes * inside, [], [True] * len(REPLAYED) * inside]


def replay_frozen(flags, config):
    """Replays a step of each stage with nothing to train, as before a window's first slot."""
    from megatron_moevement.integrations.megatron.freezing import Freezing  # noqa: PLC0415

    with boundary_run(flags, config) as (job, run):
        with run.logging():
            run.train(SAVED_AT)
            saved = run.state()
            run.train(1)
        peers = run.peers()
        freezing = Freezing(job.chunks, job.optimizer)
        for replayed in range(job.position.pp_size):
            if replayed == job.position.pp:
                run.restore(saved)
                freezing.set_active(frozenset())
                checks = run.replay(peers, REPLAYED[:1])
                found = [[check.verified, check.equal > 0] for check in checks]
                freezing.set_active(freezing.operators)
            dist.barrier()
        return found


@pytest.mark.parametrize("name", slow_but(("vpp2-overlapped",), ("pp3", "vpp2-overlapped")))
def test_a_frozen_stage_sends_what_it_sent(megatron_fork_server, name):
    for found in run_job(megatron_fork_server, replay_frozen, name):
        assert found == [[True, True]]


def log_long(flags, config, window, lag):
    """Trains for several windows, dropping steps as they are persisted."""
    from megatron_moevement.policy.copies.retention import max_log_steps, retain  # noqa: PLC0415
    from megatron_moevement.policy.window.schedule import Window  # noqa: PLC0415

    with boundary_run(flags, config, max_log_steps(window, lag)) as (job, run):
        capacity = run.log.capacity_bytes
        used = []
        with run.logging():
            for step in range(1, 1 + int(job.arguments.run.train_iters)):
                run.train(1)
                used.append(run.log.used_bytes)
                captured = step - lag - (window - 1)  # start of what is persisted with this step
                if captured >= 0:
                    newest = Window(captured - captured % window, window)
                    run.log.drop_before(retain(newest, 0).oldest_log_step)
        whole = all(set(run.log.steps) <= extent.steps for extent in run.log.extents())
        return [max(used) == capacity, run.log.capacity_bytes == capacity, whole]


def test_the_log_of_many_windows_stays_within_its_memory(megatron_fork_server):
    for found in run_job(megatron_fork_server, log_long, "pp2", 2, 1):
        assert found == [True, True, True]


def evaluate_between(flags, config):
    """Evaluates between two steps; returns whether the log changed, and how often that ran."""
    from megatron_moevement.training.evaluation import evaluate  # noqa: PLC0415
    from megatron_moevement.training.steps import build_datasets  # noqa: PLC0415

    with boundary_run([*flags, "--eval-iters=2"], config) as (job, run):
        datasets = build_datasets(job)
        with run.logging():
            run.train(1)
            before, passes = counts(run), run.passes
            hashes = {tag: tensor.hash for tag, tensor in run.log.sent(1).items()}
            evaluate(job, datasets.valid, iterations=2, round_number=0)
            same = counts(run) == before
            same = same and hashes == {tag: one.hash for tag, one in run.log.sent(1).items()}
            passes = run.passes - passes
            run.train(1)
        return [same, passes, len(run.log.steps)]


@pytest.mark.parametrize("name", slow_but(("vpp2-overlapped",), ("pp2", "vpp2-overlapped")))
def test_evaluation_logs_nothing(megatron_fork_server, name):
    _, chunks, micro_batches = SIZES[name]
    for found in run_job(megatron_fork_server, evaluate_between, name):
        assert found == [True, 2 * micro_batches * chunks, 2]


def named_by_buffer(self, tag, tensor):
    in_flight = self.pp_group.size() - self.pp_group.rank()
    self.writer.sent(dataclasses.replace(tag, micro_batch=tag.micro_batch % in_flight), tensor)


def unscaled(self, tag, tensor):
    if tag.direction.value == "backward":
        tensor = (tensor / self.config.grad_scale_func(tensor.new_ones(1))).to(tensor.dtype)
    self.writer.sent(tag, tensor)


def wrong_step_served(self, tag):
    return RIGHT["_from_log"](self, dataclasses.replace(tag, step=tag.step - 1))


def wrong_micro_batch_served(self, tag):
    return RIGHT["_from_log"](self, dataclasses.replace(tag, micro_batch=tag.micro_batch ^ 1))


def nothing_noted(self, tag, received_hash):
    del self, tag, received_hash


def evaluation_logged(self, micro_batches):
    with self._communicator.training_pass(2, 6):
        return RIGHT["forward"](self, micro_batches)


INTEGRATION = "megatron_moevement.integrations.megatron"
LOGGED = f"{INTEGRATION}.boundary_log:LoggedCommunicator"
REPLAY = f"{INTEGRATION}.boundary_replay:ReplayCommunicator"
LOG = "megatron_moevement.runtime.upstream_log.log:UpstreamLog"
SCHEDULE = f"{INTEGRATION}.schedule:PipelineSchedule"
RIGHT = {}
MUTATIONS = {
    "named by buffer": (LOGGED, "_send", named_by_buffer, "is logged twice"),
    "logged after unscaling": (LOGGED, "_send", unscaled, {"crossed", "unlike", "verified"}),
    "wrong step served": (REPLAY, "_from_log", wrong_step_served, {"unlike", "verified"}),
    "wrong micro-batch served": (
        REPLAY,
        "_from_log",
        wrong_micro_batch_served,
        {"unlike", "verified"},
    ),
    "no hash is kept": (LOG, "note_received", nothing_noted, {"crossed", "verified"}),
    "evaluation is logged": (SCHEDULE, "forward", evaluation_logged, "did not cross"),
}
"""What is replaced by what, and what that leads to on any rank."""


def run_mutated(flags, config, mutation):
    where, name, replacement, _ = MUTATIONS[mutation]
    module, _, owner = where.partition(":")
    owner = getattr(importlib.import_module(module), owner)
    RIGHT[name] = getattr(owner, name)
    setattr(owner, name, replacement)
    function = evaluate_between if name == "forward" else replay_each_stage
    try:
        return function(flags, config)
    except Exception as error:  # noqa: BLE001  (what the mutation leads to)
        return str(error)


@pytest.mark.parametrize("mutation", slow_but(("named by buffer", "wrong step served"), MUTATIONS))
def test_each_mutation_is_seen(megatron_fork_server, mutation):
    *_, seen_by = MUTATIONS[mutation]
    name = "pp2-fp16" if mutation == "logged after unscaling" else "pp2"
    found = run_job(megatron_fork_server, run_mutated, name, mutation)
    if isinstance(seen_by, str):
        assert any(seen_by in each for each in found if isinstance(each, str))
        return
    assert not any(isinstance(each, str) for each in found), found
    wrong = {
        what
        for rank, each in enumerate(found)
        for what, value in expectations(name, rank).items()
        if each[what] != value
    }
    assert wrong >= seen_by
