# SPDX-License-Identifier: Apache-2.0
"""All parallel layouts train the same model: first gradients agree, and 50 steps stay together."""

import functools
import math
from pathlib import Path

import pytest
import torch

from megatron_moevement.runtime.coordination.commit_barrier import StopRequest
from megatron_moevement.runtime.coordination.progress import START

pytestmark = pytest.mark.distributed

LAYOUTS = {
    "pp2": (2, "--pipeline-model-parallel-size=2"),
    "ep2": (2, "--expert-model-parallel-size=2"),
    "tp2": (2, "--tensor-model-parallel-size=2", "--sequence-parallel"),
    "dp2": (2,),
    "vpp2": (2, "--pipeline-model-parallel-size=2", "--num-virtual-stages-per-pipeline-rank=2"),
}
FLAGS = (
    "--num-layers=4",
    "--adam-beta1=0.0",  # the first moment is then the (clipped) gradient of the last step
    "--moe-aux-loss-coeff=0.0",  # computed from the tokens of a rank, so it depends on the layout
    "--lr=1e-2",  # small differences grow
    "--make-vocab-size-divisible-by=64",
    "--train-iters=60",
    "--global-batch-size=8",
)
RELATIVE = 1e-5
STEPS = 50


def train_from(source, target, flags, steps, towards):
    """Trains some steps from a checkpoint, saves, and returns the losses of all steps.

    Before that, weights whose index is `towards` modulo 3 move to the next number.
    """
    from megatron_moevement.training.steps import build_datasets, open_steps  # noqa: PLC0415
    from tests.harness.tiny_job import tiny_job  # noqa: PLC0415

    with tiny_job(*FLAGS, *flags) as job:
        if source:
            load(job, source)
        if towards is not None:
            change_last_bits(job, towards)
        with open_steps(job, build_datasets(job), START) as step:
            losses = [step.run(StopRequest.NONE).entry.loss for _ in range(steps)]
        if target:
            job.durable.save(Path(target), {})
        return losses


def load(job, source):
    """Takes weights and optimizer of a checkpoint."""
    from megatron_moevement.integrations.megatron.unsharded_state import (  # noqa: PLC0415
        read_unsharded_state,
    )

    common = read_unsharded_state(Path(source))
    job.durable.load(Path(source), common, with_optimizer=True, with_random_state=False)


def change_last_bits(job, towards):
    """Moves every third weight to the next number."""
    with torch.no_grad():
        for chunk in job.chunks:
            for parameter in chunk.parameters():
                flat = parameter.view(-1)[towards::3]
                flat.copy_(torch.nextafter(flat, torch.full_like(flat, math.inf)))


def first_moments(source):
    """Returns the first moment of every parameter of a checkpoint, on one rank."""
    from megatron_moevement.integrations.megatron.inventory import operator_states  # noqa: PLC0415
    from tests.harness.tiny_job import tiny_job  # noqa: PLC0415

    with tiny_job(*FLAGS) as job:
        load(job, source)
        return {
            name: value.flatten().tolist()
            for state in operator_states(job.chunks, job.optimizer)
            for name, value in state.optimizer.items()
            if name.endswith("exp_avg")
        }


class Runs:
    """One process from one checkpoint: as it is, and with last bits changed in three ways."""

    def __init__(self, server, folder):
        self.server, self.folder, self.origin = server, folder, folder / "origin"
        self.run(1, "", self.fresh("origin"), 1)
        (self.first_loss,) = self.run(1, self.origin, self.fresh("one"), 1)
        self.gradients = self.moments("one")

    @functools.cached_property
    def losses(self):
        return self.run(1, self.origin, "", STEPS)

    @functools.cached_property
    def perturbed(self):
        return [self.run(1, self.origin, "", STEPS, towards=index) for index in range(3)]

    def fresh(self, name):
        (self.folder / name).mkdir()
        return self.folder / name

    def run(self, ranks, source, target, steps, *flags, towards=None):
        args = [str(source), str(target), list(flags), steps, towards]
        result = self.server.run(train_from, world_size=ranks, args=args, timeout_s=100)
        return result.check().values[0]

    def moments(self, name):
        result = self.server.run(first_moments, world_size=1, args=[str(self.folder / name)])
        return {name: torch.tensor(value) for name, value in result.check().values[0].items()}


@pytest.fixture(scope="module")
def runs(megatron_fork_server, tmp_path_factory):
    return Runs(megatron_fork_server, tmp_path_factory.mktemp("layouts"))


def distance(one, other):
    """Returns the difference of two tensors relative to the size of the first."""
    return ((one - other).norm() / one.norm().clamp_min(1e-30)).item()


def furthest(losses, others):
    """Returns the largest difference of two runs' losses."""
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_of_the_first_step_agree_with_one_process(runs, layout):
    ranks, *flags = LAYOUTS[layout]
    (loss,) = runs.run(ranks, runs.origin, runs.fresh(layout), 1, *flags)
    assert abs(loss - runs.first_loss) <= RELATIVE * runs.first_loss
    gradients = runs.moments(layout)
    assert gradients.keys() == runs.gradients.keys()
    apart = {name: distance(runs.gradients[name], grad) for name, grad in gradients.items()}
    assert max(apart.values()) <= RELATIVE, sorted(apart.items(), key=lambda x: -x[1])[:3]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_50_steps_stay_as_close_as_two_runs_that_differ_in_the_last_bit(runs, layout):
    ranks, *flags = LAYOUTS[layout]
    losses = runs.run(ranks, runs.origin, "", STEPS, *flags)
    chaos = max(furthest(perturbed, runs.losses) for perturbed in runs.perturbed)
    assert furthest(losses, runs.losses) <= chaos
    assert losses[-1] < losses[0]
