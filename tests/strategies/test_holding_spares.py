# SPDX-License-Identifier: Apache-2.0
"""Processes that wait for a place keep copies for the ranks, as every rank's process does.

Each process is a failure domain of its own. Of two ranks and spares, spares keep the second copy.
"""

import shutil
import signal
from pathlib import Path

import pytest

from megatron_moevement.runtime.observation.events import EventName
from tests.harness.combinations import Combination
from tests.harness.fault_cover import UNTIED
from tests.harness.interruption import Program, Run, digest_differences, kill_all, send
from tests.harness.protected_run import ALWAYS_TRAINED, PROGRAM
from tests.harness.random_text import data_flags
from tests.harness.restarted_run import RESTARTABLE, await_step, events_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

MACHINES = Path(__file__).with_name("permuted_pretrain.py")
DOMAINS = Path(__file__).with_name("domains_pretrain.py")
RANKS = 2
WINDOW = 3
PROTECTED = 2 * WINDOW + 1
STEPS = PROTECTED + 8
TRAINED = (
    *Combination.of("edp3 bf16").flags,
    f"--pipeline-model-parallel-size={RANKS}",
    f"--num-layers={RANKS}",
    UNTIED,
    *ALWAYS_TRAINED,
)
PROTECTION = (
    *RESTARTABLE,
    f"--inprocess-active-world-size={RANKS}",
    "--moevement-strategy=moevement",
    f"--moevement-window={WINDOW}",
    "--moevement-replicas=2",
    "--moevement-no-replica-copy",
)


@pytest.fixture(scope="module")
def plain_digest(megatron_fork_server, text, tmp_path_factory):
    program = Program(
        megatron_fork_server, PROGRAM, RANKS, STEPS, (*TRAINED, *data_flags(text)), 200
    )
    return Run(program, tmp_path_factory.mktemp("plain")).finish()


def protected(server, text, folder, spares, *flags, program=PROGRAM):
    flags = (*TRAINED, *data_flags(text), *PROTECTION, *flags)
    return Run(Program(server, program, RANKS + spares, STEPS, flags, 200), folder)


def forget(run, job, process):
    """Takes away what a dead process kept in memory, as where its machine is lost."""
    job.wait_for_rank(process)
    for folder in run.store.glob(f"*/process-{process}"):
        shutil.rmtree(folder)


def kill(run, job, *processes):
    for number in (signal.SIGSTOP, signal.SIGKILL):
        send(job, number, processes)
    for process in processes:
        forget(run, job, process)


def levels(run, generation):
    """Returns the copies that the job reported in a generation, in their order."""
    events = events_of(run, EventName.PROTECTION, generation)
    return [event.fields["copies"] for event in events if event.logical_rank == 0]


def held_by(run, process):
    return sorted(path.stem for path in run.store.glob(f"*/process-{process}/held-*.ring"))


def test_all_ranks_are_lost_with_their_memory_and_spares_go_on(
    megatron_fork_server, text, tmp_path, plain_digest
):
    run = protected(megatron_fork_server, text, tmp_path, spares=2)
    with run.start() as job:
        await_step(run, job, PROTECTED)
        assert held_by(run, 2) == ["held-pp0.dp0.tp0.cp0.ep0", "held-pp1.dp0.tp0.cp0.ep0"]
        kill(run, job, 0, 1)
        result = job.wait()
    assert result.exit_codes == (-9, -9, 0, 0), result.describe()
    assert levels(run, 0) == [2]
    (plan,) = [one for one in events_of(run, EventName.PLAN, 1) if one.logical_rank == 0]
    assert plan.fields["verdict"] == "GLOBAL"
    assert plan.fields["lost_steps"] == 0
    assert digest_differences(run._digest(), plain_digest) == []
    assert list(run.store.rglob("*")) == []


def test_all_die_and_a_spare_of_the_next_launch_offers_what_the_last_one_held(
    megatron_fork_server, text, tmp_path, plain_digest
):
    """Each process has a store directory of its own, as on a machine of its own."""
    machines = [tmp_path / "store" / name for name in ("a", "b", "c")]
    flag = f"--machines={','.join(map(str, machines))}"
    run = protected(megatron_fork_server, text, tmp_path, 1, flag, program=MACHINES)
    with run.start() as job:
        await_step(run, job, PROTECTED)
        persisted = [one.fields for one in events_of(run, EventName.WINDOW_PERSISTED, 0)]
        result = kill_all(job, RANKS + 1)
    assert result.exit_codes == (-9, -9, -9), result.describe()
    for machine in machines[:RANKS]:
        shutil.rmtree(machine)
    with run.start() as job:
        result = job.wait()
    assert result.exit_codes == (0, 0, 0), result.describe()
    (plan,) = [one for one in events_of(run, EventName.PLAN, 0) if one.logical_rank == 0]
    assert plan.fields["verdict"] == "GLOBAL"
    # Steps whose slots were still being sent are trained again.
    assert plan.fields["target"] >= max(one["start"] + one["size"] - 1 for one in persisted)
    assert digest_differences(run._digest(), plain_digest) == []
    assert [path for machine in machines for path in machine.rglob("*")] == []


def test_more_ranks_than_there_are_copies_are_lost_with_their_domain_and_spares_go_on(
    megatron_fork_server, text, tmp_path, plain_digest
):
    """The ranks are one domain, so the one copy of each lies on a spare."""
    flags = ("--moevement-replicas=1", f"--domain-size={RANKS}")
    run = protected(megatron_fork_server, text, tmp_path, 2, *flags, program=DOMAINS)
    with run.start() as job:
        await_step(run, job, PROTECTED)
        assert [held_by(run, process) for process in (0, 1)] == [[], []]
        kill(run, job, 0, 1)
        result = job.wait()
    assert result.exit_codes == (-9, -9, 0, 0), result.describe()
    assert levels(run, 0) == [1]
    (plan,) = [one for one in events_of(run, EventName.PLAN, 1) if one.logical_rank == 0]
    assert (plan.fields["verdict"], plan.fields["lost_steps"]) == ("GLOBAL", 0)
    assert not events_of(run, EventName.PLAN, 2)
    assert digest_differences(run._digest(), plain_digest) == []
    assert list(run.store.rglob("*")) == []


def test_a_spare_that_takes_a_rank_keeps_what_it_holds_for_others(
    megatron_fork_server, text, tmp_path, plain_digest
):
    # Three domains have room for the copies that are asked for; the two that are left have not.
    strict = "--moevement-strict-replicas"
    run = protected(megatron_fork_server, text, tmp_path, 1, strict)
    with run.start() as job:
        await_step(run, job, PROTECTED)
        kill(run, job, 1)
        result = job.wait()
    assert result.exit_codes == (0, -9, 0), result.describe()
    plans = events_of(run, EventName.PLAN, 1)
    assert {plan.fields["verdict"] for plan in plans} == {"LOCALIZED"}
    recovered = {one.logical_rank: one.fields for one in events_of(run, EventName.RECOVERED, 1)}
    assert recovered[1]["replay_verified"] is True
    assert recovered[0]["moved_copies"] == 0
    assert (levels(run, 0), levels(run, 1)) == ([2], [1])
    assert digest_differences(run._digest(), plain_digest) == []
    assert list(run.store.rglob("*")) == []


@pytest.mark.slow
def test_a_spare_that_holds_copies_is_lost_and_training_goes_on(
    megatron_fork_server, text, tmp_path, plain_digest
):
    run = protected(megatron_fork_server, text, tmp_path, spares=1)
    with run.start() as job:
        await_step(run, job, PROTECTED)
        kill(run, job, 2)
        result = job.wait()
    assert result.exit_codes == (0, 0, -9), result.describe()
    assert {plan.fields["verdict"] for plan in events_of(run, EventName.PLAN, 1)} == {"RESUME"}
    assert (levels(run, 0), levels(run, 1)) == ([2], [1])
    assert "2 failure domains have no room for 2 copies" in result.ranks[0].stderr
    assert digest_differences(run._digest(), plain_digest) == []
    assert list(run.store.rglob("*")) == []


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "verdict"), [((1,), "LOCALIZED"), ((0, 1), "GLOBAL")])
def test_a_spare_that_goes_on_waiting_gives_what_it_holds(
    megatron_fork_server, text, tmp_path, plain_digest, lost, verdict
):
    """Of three spares one holds the copies of both ranks; which ones come in is not fixed."""
    run = protected(megatron_fork_server, text, tmp_path, spares=3)
    with run.start() as job:
        await_step(run, job, PROTECTED)
        assert [len(held_by(run, process)) for process in (2, 3, 4)] == [2, 1, 0]
        kill(run, job, *lost)
        result = job.wait()
    assert sorted(result.exit_codes) == [*[-9] * len(lost), *[0] * (5 - len(lost))]
    assert {plan.fields["verdict"] for plan in events_of(run, EventName.PLAN, 1)} == {verdict}
    assert (levels(run, 0), levels(run, 1)) == ([2], [2])
    assert digest_differences(run._digest(), plain_digest) == []
    assert list(run.store.rglob("*")) == []
