# SPDX-License-Identifier: Apache-2.0
"""What the explorer draws: jobs that can be started, the same ones from the same seed."""

import json
from collections import Counter

import pytest

from megatron_moevement.policy.faults.fault_schedule import FaultKind
from megatron_moevement.policy.window.ordering import Ordering
from megatron_moevement.settings.faults import Fault, FaultPoint
from megatron_moevement.settings.restart import check_restart
from megatron_moevement.training.arguments import parse
from tests.harness.explorer.drawn_history import MOST_PROCESSES
from tests.harness.explorer.history import History, Launch
from tests.harness.explorer.job import DrawnJob, Source
from tests.harness.explorer.scenario import (
    Scenario,
    draw_scenario,
    dump_scenario,
    load_scenario,
)
from tests.harness.random_text import prepare_random_text

SEEDS = range(500)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return prepare_random_text(tmp_path_factory.mktemp("text"))


def launches():
    for seed in SEEDS:
        for launch in draw_scenario(seed).history.launches:
            yield draw_scenario(seed), launch


@pytest.mark.parametrize("first", range(0, 150, 50))
def test_every_job_that_is_drawn_can_be_started(first, text, tmp_path):
    for seed in range(first, first + 50):
        scenario = draw_scenario(seed)
        for launch in scenario.history.launches:
            flags = scenario.launch_flags(launch, text, tmp_path)
            arguments = parse(flags, scenario.job.layout.ranks + launch.spares)
            assert arguments.world_size == scenario.job.layout.ranks


@pytest.mark.parametrize("run_s", [0.0, 4.0, 60.0, 240.0])
@pytest.mark.parametrize("fault", ["stop:3:barrier@0", "kill:3:barrier@0"])
def test_a_busy_machine_is_given_more_time(fault, run_s, text, tmp_path):
    launch = Launch(1, (Fault.parse(fault),))
    arguments = parse(
        Scenario(None, DrawnJob(), History((launch,))).launch_flags(launch, text, tmp_path, run_s),
        2,
    )
    check_restart(arguments.restart)
    assert arguments.restart.inprocess_soft_timeout >= 2 * run_s
    assert arguments.restart.inprocess_heartbeat_timeout >= run_s


def test_a_seed_gives_the_same_scenario_again():
    for seed in SEEDS:
        assert draw_scenario(seed) == draw_scenario(seed)


def test_a_scenario_is_read_as_it_was_written():
    for seed in SEEDS:
        scenario = draw_scenario(seed)
        assert load_scenario(json.loads(json.dumps(dump_scenario(scenario)))) == scenario


def test_every_place_and_every_kind_is_drawn():
    faults = [fault for _, launch in launches() for fault in launch.faults]
    assert {fault.place for fault in faults} == set(FaultPoint)
    assert {fault.kind for fault in faults} == set(FaultKind)
    assert {fault.generation for fault in faults} >= {0, 1, 2}


def test_histories_have_one_to_four_strikes_and_few_processes():
    strikes = Counter(draw_scenario(seed).history.strikes for seed in SEEDS)
    assert {1, 2, 3, 4} <= set(strikes)
    for scenario, launch in launches():
        ranks = scenario.job.layout.ranks
        assert launch.faults or launch.kills
        assert launch.spares <= max(0, MOST_PROCESSES - ranks)


def test_jobs_are_asymmetric_often_enough():
    jobs = [draw_scenario(seed).job for seed in SEEDS]
    assert sum(job.model.vocabulary >= 1000 for job in jobs) > 75
    assert sum(job.layout.ep > 1 for job in jobs) > 75
    assert sum(job.layout.ep > 1 and "distributed" in job.training.optimizer for job in jobs) > 75
    assert sum(job.protection.window == 4 for job in jobs) > 100
    assert {job.protection.window for job in jobs} >= {1, 2, 3, 4, 5, 6, 8}
    assert {job.training.source for job in jobs} == set(Source)
    assert {job.protection.order for job in jobs} == {each.value for each in Ordering}
    assert sum(job.protection.bandwidths > 0 for job in jobs) > 100
    assert sum(job.training.saves_beside for job in jobs) > 50


def test_whole_failure_domains_are_struck():
    struck = 0
    for scenario, launch in launches():
        job = scenario.job
        if job.protection.domain > 1:
            assert job.copies >= min(1, job.protection.replicas)
            groups = [fault.ranks for fault in launch.faults]
            groups += [kill.ranks for kill in launch.kills if kill.ranks is not None]
            struck += any(set(ranks) == {0, 1} for ranks in groups)
    assert struck > 5
