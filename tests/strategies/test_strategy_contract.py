# SPDX-License-Identifier: Apache-2.0
"""What every strategy has to keep, and what the training loop owes it: one body for all of them."""

import dataclasses
import re
from datetime import timedelta

import pytest

from megatron_moevement.backends.cpu import CpuBackend
from megatron_moevement.errors import UserError
from megatron_moevement.settings.fault_tolerance import OFF, FaultTolerance
from megatron_moevement.settings.launch import Launch
from megatron_moevement.strategies.registry import STRATEGIES, Registered, register
from megatron_moevement.strategies.strategy import StartOver
from megatron_moevement.training.deciding import DECIDING
from megatron_moevement.training.run_identity import identify
from tests.harness import toy_strategy
from tests.harness.tiny_job import tiny_arguments, tiny_job

NAMES = sorted(STRATEGIES)
STEPS, DEATH = 8, 5
STEP = (
    "replayed_gradient_stats await_commit replica_rng agree_within_stage "
    "enter_commit commit after_step "
)
WITH_COSTS = f"{STEP}costs "


def flags(name):
    return (f"--moevement-strategy={name}", "--moevement-window=2", "--moevement-replicas=0")


def settings(name):
    return tiny_arguments(*flags(name)).fault_tolerance


def test_three_strategies_are_there():
    assert set(NAMES) == {OFF, "moevement", toy_strategy.TOY}


@pytest.mark.parametrize("name", NAMES)
def test_its_name_and_its_sizes_are_sorted_as_what_a_store_is(name):
    assert STRATEGIES[name].sizes | {"moevement_strategy"} <= DECIDING[FaultTolerance].layout
    assert settings(name).is_on == (name != OFF)


def test_a_run_has_a_store_for_each_strategy_and_its_sizes():
    runs = [identify(tiny_arguments(*flags(name))) for name in NAMES]
    assert len({run.digest for run in runs}) == 1
    assert len({run.fingerprint for run in runs}) == len(NAMES)
    for name in NAMES:
        run = identify(tiny_arguments(*flags(name)))
        other = identify(tiny_arguments(*flags(name), "--moevement-window=3"))
        has_windows = "moevement_max_window" in STRATEGIES[name].sizes
        assert (run.fingerprint != other.fingerprint) == has_windows


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="there is a strategy 'off'"):
        register(OFF, Registered(toy_strategy.Toy))


def test_an_unknown_name_is_refused_with_those_that_there_are():
    with pytest.raises(UserError, match=f"'none' is none of off, moevement, {toy_strategy.TOY}"):
        settings("none")


@pytest.mark.parametrize("name", NAMES)
def test_a_process_without_a_rank_needs_no_file(name, tmp_path):
    from megatron_moevement.runtime.coordination.generation import Generation  # noqa: PLC0415

    kept = STRATEGIES[name].begin(settings(name))
    kept.store.keep()
    kept.renew()
    kept.note_outage({"detect": 1.0}, 2.0)
    launch = Launch(rank=0, world_size=1, local_rank=0)
    with Generation() as generation:
        holder = kept.hold(launch, "here", generation, CpuBackend().pin)
        holder.look()
        holder.end()
    store = kept.store
    assert (store.folder, store.refusal) == (None, None)
    assert not store.has_state
    assert not store.is_over
    store.stay()
    store.abandon(timedelta(0))
    store.close()


class Recorder:
    """Notes the calls of a strategy."""

    def __init__(self, strategy, calls):
        self._strategy = strategy
        self._calls = calls

    def __getattr__(self, name):
        method = getattr(self._strategy, name)

        def call(*args):
            self._calls.append(name)
            result = method(*args)
            return self._noting(result) if isinstance(result, StartOver) else result

        return call

    def _noting(self, start_over):
        def begin(progress):
            self._calls.append("begin")
            return start_over.begin(progress)

        return dataclasses.replace(start_over, begin=begin)


class DeathError(Exception):
    """The job ends here, as if it had been killed between two steps."""


def train(folder, name, death):
    """Trains until a step; returns what the strategy was called for, and a digest of the state."""
    from megatron_moevement.runtime.coordination.generation import Generation  # noqa: PLC0415
    from megatron_moevement.training.loop import train as run_loop  # noqa: PLC0415
    from megatron_moevement.training.resident import Resident  # noqa: PLC0415
    from megatron_moevement.training.state_digest import state_digests  # noqa: PLC0415
    from megatron_moevement.training.stop_request import StopSources  # noqa: PLC0415

    calls, digest = [], None
    with tiny_job(*flags(name), f"--moevement-store-dir={folder}/store") as job:
        resident = Resident(job.arguments, job.backend)
        open_own = resident.kept.open
        resident.kept.open = lambda protected: Recorder(open_own(protected), calls)
        note_step = resident.note_step

        def die():
            note_step()
            if calls.count("commit") == death:
                raise DeathError

        resident.note_step = die
        try:
            with Generation() as generation:
                ending = run_loop(job, StopSources(None), resident, generation)
            digest = state_digests(job, ending.progress)
        except DeathError:
            pass
        resident.close()
    return ["".join(f"{call} " for call in calls), digest]


@pytest.fixture(scope="module")
def launch(megatron_fork_server):
    """Returns what trains on one rank, in a process of its own."""

    def run(*arguments):
        result = megatron_fork_server.run(train, world_size=1, args=list(arguments))
        return result.check().values[0]

    return run


@pytest.fixture(scope="module")
def undisturbed(launch, tmp_path_factory):
    """Returns the digest of a job that nothing protects and nobody interrupts."""
    calls, digest = launch(str(tmp_path_factory.mktemp("plain")), OFF, 0)
    assert calls == f"recover begin {WITH_COSTS * STEPS}finish close "
    return digest


@pytest.mark.distributed
@pytest.mark.parametrize("name", NAMES)
def test_a_job_that_ends_on_the_way_goes_on_by_the_sequence_of_calls(
    launch, undisturbed, tmp_path, name
):
    calls, _ = launch(str(tmp_path), name, DEATH)
    assert calls == f"recover begin {WITH_COSTS * (DEATH - 1)}{STEP}close "
    again, digest = launch(str(tmp_path), name, 0)
    lost = STEPS if name == OFF else STEPS - DEATH
    recovered = "recover begin " if name == OFF else f"recover ({STEP})*rejoin "
    assert re.fullmatch(f"{recovered}{WITH_COSTS * lost}finish close ", again)
    assert digest == undisturbed
    assert [file for file in tmp_path.glob("store/**/*") if file.is_file()] == []
