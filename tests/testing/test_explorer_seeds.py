# SPDX-License-Identifier: Apache-2.0
"""A few fixed scenarios of the explorer, each of which found something once."""

import dataclasses

import pytest

from megatron_moevement.settings.faults import Fault
from tests.harness.explorer.drawn_job import LOPSIDED
from tests.harness.explorer.history import History, Kill, Launch
from tests.harness.explorer.job import (
    DrawnJob,
    Layout,
    Model,
    Protection,
    Source,
    Training,
)
from tests.harness.explorer.oracle import judge
from tests.harness.explorer.running import Runner
from tests.harness.explorer.scenario import Scenario
from tests.harness.random_text import prepare_random_text

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


def launch(*faults, spares=0, kills=()):
    return Launch(spares, tuple(map(Fault.parse, faults)), tuple(kills))


PP2 = DrawnJob(Layout(pp=2), Model(), Training(steps=16, source=Source.TEXT), Protection(window=3))
SAVING = dataclasses.replace(PP2, training=dataclasses.replace(PP2.training, save_every=5))
TIERED = dataclasses.replace(
    PP2, protection=Protection(window=3, tier_interval=1, tiers_by_url=True)
)
WITHOUT_EXPERTS = DrawnJob(
    Layout(pp=2, dp=2, ep=2, vpp=2),
    Model(every=2, experts=8, topk=1),
    Training(steps=8, passes=4, optimizer="distributed-overlap", precision="bf16", save_every=3),
    Protection(window=2),
)
SCENARIOS = {
    "a loss long after a transfer failed": (
        PP2,
        launch("exception:5:send@0", "exception:8:send@0", "kill:13:backward@0", spares=1),
    ),
    "those ahead are lost while the one behind is cut in its roll-forward": (
        PP2,
        launch(
            "exception:12:after-barrier@1",
            "exception:12:ledger@1#1",
            "kill:12:start@0#2",
            spares=1,
        ),
    ),
    "all ranks at once, with spares": (SAVING, launch("kill:12:barrier@0,1", spares=2)),
    "too few spares, and a relaunch": (
        SAVING,
        launch("kill:8:backward@0", "segfault:11:commit@1#1", spares=1),
        launch("stop:13:gather@1", spares=1),
    ),
    "a stage without experts, and the death of all": (
        WITHOUT_EXPERTS,
        launch(kills=[Kill(5, None, 0.1)]),
    ),
    "the loss of all memory, with tiers": (
        TIERED,
        launch(spares=1, kills=[Kill(12, None, 0.3, forgets=True)]),
        launch("kill:14:backward@0", spares=1),
    ),
    "a loss without a copy, with tiers": (
        dataclasses.replace(TIERED, protection=dataclasses.replace(TIERED.protection, replicas=0)),
        launch(spares=1, kills=[Kill(12, (0,), 0.3, forgets=True)]),
    ),
    "slots of which one expert-parallel rank has no part": (
        LOPSIDED[0],
        launch("kill:9:barrier@1", spares=1),
    ),
}


SLOW = {
    "a stage without experts, and the death of all",
    "those ahead are lost while the one behind is cut in its roll-forward",
    "too few spares, and a relaunch",
    "the loss of all memory, with tiers",
}


@pytest.fixture(scope="module")
def runner(megatron_fork_server, tmp_path_factory):
    return Runner(megatron_fork_server, prepare_random_text(tmp_path_factory.mktemp("text")))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in SCENARIOS],
)
def test_everything_is_as_promised(name, runner, tmp_path):
    job, *launches = SCENARIOS[name]
    scenario = Scenario(None, job, History(tuple(launches)))
    assert judge(scenario, runner.run(scenario, tmp_path)) == []
