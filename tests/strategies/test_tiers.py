# SPDX-License-Identifier: Apache-2.0
"""A job that lost all of its memory goes on from the newest whole tier, to the same bits."""

import dataclasses
import itertools
import os
import shutil
import sys
import time
from pathlib import Path
from random import Random

import pytest

from megatron_moevement.runtime.observation.events import EventName
from megatron_moevement.runtime.stores.store import process_folders
from megatron_moevement.runtime.tiers.manifests import begun_tiers, read_manifest, whole_tiers
from megatron_moevement.runtime.tiers.target import open_target
from tests.harness.interruption import Run, digest_differences, kill_all
from tests.harness.protected_run import Case, plans_of
from tests.harness.restarted_run import events_of, restartable_program

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASE = Case.of("vpp2 bf16 distributed grouped", 3)
NOTHING_DRAWN = Case.of("vpp2 bf16 distributed grouped no-dropout", 3)
RUN_ID = "tiered"
SLOW = Path(__file__).with_name("slow_tier_pretrain.py")
GPU_LIKE = SLOW.with_name("gpu_like_pretrain.py")
OTHER_KERNELS = SLOW.with_name("other_kernels_pretrain.py")
PATIENCE_S = 100
LONGEST_WRITING_S = 2.0
REPLAY = EventName.REPLAY
FOLDER = "FOLDER"
SCHEDULES = ("--moevement-min-window=2", "--moevement-schedule-changes=2:2")
KINDS = (
    "vpp2 bf16 distributed grouped",
    "pp2-ep2 bf16 distributed grouped",
    "edp3 fp16 distributed bias",
    "vpp2 fp32 replicated",
)
KILLS = int(os.environ.get("TIER_KILLS", "20"))
SEED = os.environ.get("TIER_SEED", "0")


def protected(case, server, text, *flags):
    return case.protected_program(server, text, *flags)


def restartable(case, server, text, *flags):
    return restartable_program(case, server, text, 1, *flags)


class TieredRun(Run):
    """A run whose persisted windows go to a folder beside it."""

    def __init__(
        self, server, text, folder, *flags, case=CASE, make=protected, place=None, **program
    ):
        place = f"{folder}/tiers" if place is None else place
        kept = (f"--moevement-tier-dir={place}", f"--moevement-run-id={RUN_ID}")
        super().__init__(
            dataclasses.replace(make(case, server, text, *kept, *flags), **program), folder
        )
        self.target = open_target(place, RUN_ID)

    def kill_when(self, happened):
        """Starts a job and kills it once something has happened; returns how it ended."""
        with self.start() as job:
            ends_s = time.monotonic() + PATIENCE_S
            while not happened() and not job.has_ended and time.monotonic() < ends_s:
                job.poll()
            return kill_all(job, self._program.world_size)

    def lose_memory(self):
        shutil.rmtree(self.store)

    def leave_tiers(self):
        """Launches that follow get no target."""
        flags = [each for each in self._program.flags if "-tier-dir=" not in each]
        self._program = dataclasses.replace(self._program, flags=tuple(flags))

    @property
    def newest(self):
        return max(whole_tiers(self.target), default=None)

    @property
    def reached(self):
        """The newest step that any rank has reported."""
        steps = [event.iteration for event in events_of(self, EventName.ITERATION, None)]
        return max(steps, default=0)

    @property
    def taken(self):
        """The steps of the tiers that launches went on from."""
        return [plan["target"] for plan in plans_of(self)]


@pytest.fixture
def run(megatron_fork_server, text, tmp_path):
    return TieredRun(megatron_fork_server, text, tmp_path)


def kill_with_two_tiers(run, ahead=0):
    """Kills a job that has two tiers, and has reported so many steps after the newest."""

    def happened():
        whole = whole_tiers(run.target)
        return len(whole) == 2 and run.reached >= max(whole).committed + ahead

    result = run.kill_when(happened)
    assert set(result.exit_codes) == {-9}, result.describe()


def test_without_any_memory_a_launch_goes_on_from_the_newest_tier(run, uninterrupted):
    kill_with_two_tiers(run)
    run.lose_memory()
    name = run.newest
    window = read_manifest(run.target, name).window
    written = events_of(run, EventName.TIER_WRITTEN, None)
    assert digest_differences(run.finish(), uninterrupted(CASE)) == []
    (plan,) = plans_of(run)
    assert (plan["verdict"], plan["window"]) == ("GLOBAL", window.start)
    assert (plan["target"], plan["lost_steps"]) == (name.committed, 0)
    assert {(event.logical_rank, event.fields["tier_bytes"] > 0) for event in written} == {
        (0, True)
    }
    assert written[0].iteration < name.committed
    steps = range(window.start + 1, name.committed + 1)
    replays = [(event.logical_rank, event.iteration) for event in events_of(run, REPLAY, None)]
    assert sorted(replays) == sorted(itertools.product(range(2), steps))
    assert all(event.fields["replay_verified"] for event in events_of(run, REPLAY, None))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("combination", "flags"),
    [
        ("pp2-ep2 bf16 distributed grouped", ("--moevement-order=decayed",)),
        ("edp3 fp16 distributed bias", ("--moevement-replicas=0",)),
        ("vpp2 fp32 replicated", (f"--moevement-tier-dir=file://{FOLDER}",)),
        ("vpp2 bf16 distributed", SCHEDULES),
    ],
)
def test_so_do_jobs_of_other_kinds(
    megatron_fork_server, text, tmp_path, uninterrupted, combination, flags
):
    case = Case.of(combination, 3)
    flags = tuple(flag.replace(FOLDER, f"{tmp_path}/tiers") for flag in flags)
    run = TieredRun(megatron_fork_server, text, tmp_path, *flags, case=case)
    kill_with_two_tiers(run)
    run.lose_memory()
    name = run.newest
    assert digest_differences(run.finish(), uninterrupted(case)) == []
    assert run.taken == [name.committed]


@pytest.mark.slow
def test_so_do_jobs_with_an_object_store(
    megatron_fork_server, text, tmp_path, uninterrupted, object_store
):
    object_store.system.mkdir("bucket")
    place = {"place": "s3://bucket/tiers", "env": object_store.environment}
    run = TieredRun(megatron_fork_server, text, tmp_path, **place)
    kill_with_two_tiers(run)
    run.lose_memory()
    name = run.newest
    assert digest_differences(run.finish(), uninterrupted(CASE)) == []
    assert run.taken == [name.committed]
    assert len(whole_tiers(run.target)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("place", ["plan", "open", "replay", "rejoin"])
def test_a_death_while_a_launch_goes_on_from_a_tier_loses_nothing_of_it(
    megatron_fork_server, text, tmp_path, uninterrupted, place
):
    run = TieredRun(megatron_fork_server, text, tmp_path, make=restartable)
    kill_with_two_tiers(run)
    run.lose_memory()
    name = run.newest
    step = name.committed - (place == "replay")
    with run.start("--moevement-faults", f"{step}:{place}@1#0") as job:
        result = job.wait()
    assert sorted(result.exit_codes) == [-9, 0, 0], result.describe()
    assert digest_differences(run._digest(), uninterrupted(CASE)) == []
    plans = {(one.generation, one.fields["target"]) for one in events_of(run, EventName.PLAN, None)}
    assert (1, name.committed) in plans


@pytest.mark.slow
def test_a_tier_becomes_a_checkpoint_on_other_machines(run, uninterrupted, tmp_path):
    kill_with_two_tiers(run)
    run.lose_memory()
    name, there = run.newest, sorted((tmp_path / "tiers").rglob("*"))
    elsewhere = tmp_path / "elsewhere"
    flags = (f"--save={elsewhere}", f"--moevement-store-dir={tmp_path}/second")
    converted = run.finish("--moevement-recover-only", *flags)
    assert converted["iteration"] == name.committed
    assert sorted((tmp_path / "tiers").rglob("*")) == there
    third = f"--moevement-store-dir={tmp_path}/third"
    assert digest_differences(run.finish(f"--load={elsewhere}", third), uninterrupted(CASE)) == []
    assert run.taken == [name.committed]  # the checkpoint is as new as the tier


@pytest.mark.slow
def test_a_tier_of_gpus_becomes_a_checkpoint_without_any(
    megatron_fork_server, text, tmp_path, uninterrupted
):
    run = TieredRun(megatron_fork_server, text, tmp_path, case=NOTHING_DRAWN)
    cpus = run._program
    run._program = dataclasses.replace(cpus, path=GPU_LIKE)
    kill_with_two_tiers(run)
    run.lose_memory()
    run._program = cpus
    elsewhere = tmp_path / "elsewhere"
    with run.start("--moevement-recover-only", f"--save={elsewhere}") as job:
        result = job.wait().check()
    said = result.ranks[0].stdout + result.ranks[0].stderr
    assert "guarantee CONSISTENT" in said
    assert "rank 0 has another device than at first" in said
    assert "the random streams of the device start again from --seed" in said
    assert run.taken == [run.newest.committed]
    second = f"--moevement-store-dir={tmp_path}/second"
    finished = run.finish(f"--load={elsewhere}", second, "--moevement-tier-dir=/proc/refuses")
    assert digest_differences(finished, uninterrupted(NOTHING_DRAWN)) == []


def test_a_tier_of_a_job_with_a_w_is_refused_with_that_w_where_none_is_given(run, uninterrupted):
    kill_with_two_tiers(run)
    run.lose_memory()
    name = run.newest
    with run.start("--moevement-window=auto") as job:
        result = job.wait()
    assert set(result.exit_codes) == {2}
    said = result.ranks[0].stdout + result.ranks[0].stderr
    assert f"was written by a job of other flags, with W = {CASE.window}: launch with those" in said
    assert f"(--moevement-window {CASE.window} where it had a W, else its limits of W)" in said
    assert digest_differences(run.finish(), uninterrupted(CASE)) == []
    assert run.taken == [name.committed]


@pytest.mark.slow
def test_machines_that_compute_otherwise_go_on_from_a_tier_and_promise_no_bits(run, uninterrupted):
    kill_with_two_tiers(run)
    run.lose_memory()
    name, other = run.newest, {"MKL_CBWR": "COMPATIBLE"}
    run._program = dataclasses.replace(run._program, path=OTHER_KERNELS, env=other)
    with run.start() as job:
        result = job.wait().check()
    line = "guarantee CONSISTENT: a recovery loses nothing, bits may differ: rank 0 has another "
    assert f"{line}MKL_CBWR than at first" in result.ranks[0].stdout + result.ranks[0].stderr
    assert run.taken == [name.committed]
    assert not all(event.fields["replay_verified"] for event in events_of(run, REPLAY, None))
    assert digest_differences(run._digest(), uninterrupted(CASE)) != []


@pytest.mark.slow
def test_so_they_do_though_they_die_before_a_window_of_their_own_is_persisted(run):
    kill_with_two_tiers(run)
    run.lose_memory()
    name, other = run.newest, {"MKL_CBWR": "COMPATIBLE"}
    run._program = dataclasses.replace(run._program, path=OTHER_KERNELS, env=other)
    with run.start("--moevement-faults", f"{name.committed + 2}:barrier") as job:
        assert 0 not in job.wait().exit_codes
    run.leave_tiers()
    with run.start() as job:
        result = job.wait().check()
    said = result.ranks[0].stdout + result.ranks[0].stderr
    assert "guarantee CONSISTENT: a recovery loses nothing, bits may differ: " in said
    assert "goes on from the tier" not in said
    assert run.taken == [name.committed, name.committed + 1]
    assert list(run.store.rglob("origin.json")) == []


@pytest.mark.slow
@pytest.mark.parametrize("lost", [(), (0,), (1,)])
def test_what_is_newer_in_memory_wins(run, uninterrupted, lost):
    kill_with_two_tiers(run, ahead=2)
    (run_folder,) = run.store.iterdir()
    for process in lost:  # the other one has its copies
        shutil.rmtree(process_folders(run_folder)[process])
    newest, reached = run.newest, run.reached
    assert digest_differences(run.finish(), uninterrupted(CASE)) == []
    assert run.taken[0] >= reached - len(lost)
    assert run.taken[0] > newest.committed


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_memory_that_lacks_what_a_rank_had_is_given_up_for_a_tier(
    megatron_fork_server, text, tmp_path, uninterrupted, lost
):
    run = TieredRun(megatron_fork_server, text, tmp_path, "--moevement-replicas=0")
    kill_with_two_tiers(run, ahead=2)
    (run_folder,) = run.store.iterdir()
    shutil.rmtree(process_folders(run_folder)[lost])
    name = run.newest
    assert digest_differences(run.finish(), uninterrupted(CASE)) == []
    assert run.taken == [name.committed]
    assert list(run.store.rglob("*")) == []


@pytest.mark.slow
def test_a_newer_durable_checkpoint_wins(megatron_fork_server, text, tmp_path, uninterrupted):
    run = TieredRun(megatron_fork_server, text, tmp_path, "--save-interval=1")
    kill_with_two_tiers(run, ahead=2)
    run.lose_memory()
    assert digest_differences(run.finish(), uninterrupted(CASE)) == []
    assert run.taken == []


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["slots", "json", "manifest"])
def test_where_the_newest_tier_is_damaged_the_one_before_is_taken(run, uninterrupted, ending):
    kill_with_two_tiers(run)
    run.lose_memory()
    older, name = sorted(whole_tiers(run.target))
    folder = Path(run.target.place)
    path = folder / f"{name}.manifest"
    if ending != "manifest":
        path = next((folder / str(name)).glob(f"pp1*.{ending}"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert digest_differences(run.finish(), uninterrupted(CASE)) == []
    assert run.taken == [older.committed]


@pytest.mark.slow
def test_a_target_that_refuses_everything_is_harmless(
    megatron_fork_server, text, tmp_path, uninterrupted
):
    flags = ("--moevement-tier-dir=/proc/refuses",)
    run = TieredRun(megatron_fork_server, text, tmp_path, *flags)
    with run.start() as job:
        result = job.wait().check()
    lines = [line for line in result.ranks[0].stderr.splitlines() if "no tier of step" in line]
    assert 1 <= len(lines) <= 4
    assert digest_differences(run._digest(), uninterrupted(CASE)) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("combination", KINDS)
def test_kills_at_random_moments_of_writing_lose_no_whole_tier(
    megatron_fork_server, text, tmp_path, uninterrupted, combination
):
    case = dataclasses.replace(Case.of(combination, 3), deaths=4)
    random, kills, torn, seen = Random(f"{SEED} {combination}"), 0, 0, {}
    wanted = KILLS // len(KINDS)
    while kills < wanted:
        folder = tmp_path / f"after{kills}"
        interval, keep = random.randint(1, 2), random.randint(1, 3)
        flags = (f"--moevement-tier-interval={interval}", f"--moevement-tier-keep={keep}")
        program = random.choice(({}, {"path": SLOW}))
        run = TieredRun(megatron_fork_server, text, folder, *flags, case=case, **program)
        expected = []
        while kills < wanted:
            result = run.kill_when(new_tier(run, random))
            if any(run.checkpoints.glob(f"*{case.train_iters}")):
                break  # it had reached its end
            kills += 1
            torn += max(begun_tiers(run.target)) not in whole_tiers(run.target)
            run.lose_memory()
            if run.newest is not None:
                expected.append(run.newest.committed)
                lost = run.reached - run.newest.committed
                seen.setdefault((bool(program), interval), []).append(lost)
                # The last slot and the manifest are written while the next window is captured.
                is_late = any("no tier of step" in rank.stderr for rank in result.ranks)
                assert is_late or lost < (interval + 1) * case.window
        assert digest_differences(run.finish(), uninterrupted(case)) == []
        assert run.taken[: len(expected)] == expected
    sys.stdout.write(f"{combination}: {kills} kills, {torn} left a torn tier; W = {case.window}\n")
    for (is_slow, interval), lost in sorted(seen.items()):
        sys.stdout.write(
            f"  N = {interval}{', slow target' * is_slow}: {len(lost)} launches from a tier, "
            f"steps trained again: {sorted(lost)}\n"
        )
    assert torn > wanted // 5


def new_tier(run, random):
    """Returns what says whether some time has passed since the job began another tier."""
    before = set(begun_tiers(run.target))

    def happened():
        if not set(begun_tiers(run.target)) - before:
            return False
        time.sleep(random.uniform(0, LONGEST_WRITING_S))
        return True

    return happened
