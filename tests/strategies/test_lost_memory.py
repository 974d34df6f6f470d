# SPDX-License-Identifier: Apache-2.0
"""Memory that is lost with its process, or does not read as it was written."""

import dataclasses
import functools
import itertools
import shutil
from random import Random

import pytest

from megatron_moevement.runtime.slots.journal import Journal
from megatron_moevement.runtime.slots.ring_file import RingFile
from megatron_moevement.runtime.stores.store import JOURNAL_NAME, process_folders, stored_rings
from tests.harness.default_run import slow_but
from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case, check_replays, plans_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASE = Case.of("vpp2 fp16 distributed grouped", 3)
FOUR = dataclasses.replace(Case.of("pp2-ep2 bf16 distributed", 2), deaths=1)
FEW_COPIES = ("--moevement-replicas=1", "--save-interval=4")


@pytest.fixture(scope="module")
def killed_run(megatron_fork_server, text, tmp_path_factory):
    """Returns a function that returns, in a folder, a run whose processes were all killed.

    A run with the same case and flags is killed once; each folder has all that it left.
    """

    @functools.cache
    def kill(case, flags):
        folder = tmp_path_factory.mktemp("killed")
        run = Run(case.protected_program(megatron_fork_server, text, *flags), folder)
        run.kill(case.protected_from + 1, Random(0))
        return folder

    def copy(folder, case, *flags):
        shutil.copytree(kill(case, flags), folder, dirs_exist_ok=True)
        return Run(case.protected_program(megatron_fork_server, text, *flags), folder)

    return copy


def folders(run):
    (run_folder,) = run.store.iterdir()
    return process_folders(run_folder)


@pytest.mark.parametrize("lost", slow_but([(0, 1)], itertools.combinations(range(4), 2)))
def test_the_memory_of_as_many_ranks_as_there_are_copies_may_be_lost(
    killed_run, uninterrupted, tmp_path, lost
):
    run = killed_run(tmp_path, FOUR, "--moevement-replicas=2")
    for process in lost:
        shutil.rmtree(folders(run)[process])
    assert digest_differences(run.finish(), uninterrupted(FOUR)) == []
    check_replays(run, FOUR, launches=1, forgotten=lost)


def test_when_more_is_lost_all_replay_from_the_durable_checkpoint_and_say_so(
    killed_run, uninterrupted, tmp_path
):
    run = killed_run(tmp_path, FOUR, *FEW_COPIES)
    for process in (0, 1, 2):
        shutil.rmtree(folders(run)[process])
    with run.start() as job:
        result = job.wait().check()
    (plan,) = plans_of(run)
    assert (plan["verdict"], plan["window"], plan["lost_steps"]) == ("GLOBAL", None, 0)
    said = [line for rank in result.ranks for line in rank.stderr.splitlines() if "GLOBAL:" in line]
    assert len(said) == 1
    assert "all replay from the durable checkpoint of step 4" in said[0]
    assert plan["replayed_steps"] == plan["target"] - 4
    assert digest_differences(run._digest(), uninterrupted(FOUR)) == []


def flip(ring, record, random, bits):
    """Flips bits of one byte of a slot."""
    assert ring.damaged_parts(record) == ()
    part = random.choice([part for part in record.parts if part.size_bytes])
    ring.payload(record)[part.offset + random.randrange(part.size_bytes)] ^= bits
    assert ring.damaged_parts(record) == (part.name,)


@pytest.mark.parametrize("seed", slow_but([3], range(6)))
def test_one_wrong_byte_of_one_slot_changes_nothing(killed_run, uninterrupted, tmp_path, seed):
    """The slot is one's own or held for another rank, and of the window that is loaded."""
    run, random = killed_run(tmp_path, FOUR, *FEW_COPIES), Random(seed)
    rings = [stored.path for folder in folders(run).values() for stored in stored_rings(folder)]
    assert len(rings) == 2 * FOUR.combination.world_size
    ring = RingFile.open(random.choice(rings), None)
    window = Journal.open(ring.path.with_name(JOURNAL_NAME), None).state.persisted
    records = [record for record in ring.records() if record.window == window]
    flip(ring, random.choice(records), random, bits=random.randrange(1, 256))
    ring.close()
    assert digest_differences(run.finish(), uninterrupted(FOUR)) == []
    check_replays(run, FOUR, launches=1)


def damage_every_slot(path, random):
    """Flips one bit in every slot that a ring holds."""
    ring = RingFile.open(path, None)
    records = ring.records()
    assert records
    for record in records:
        flip(ring, record, random, bits=1 << random.randrange(8))
    ring.close()


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_flipped_bits_in_all_that_a_process_keeps_change_nothing(
    killed_run, uninterrupted, tmp_path, process
):
    run = killed_run(tmp_path, CASE, "--moevement-replicas=1")
    random = Random(process)
    for stored in stored_rings(folders(run)[process]):
        damage_every_slot(stored.path, random)
    assert digest_differences(run.finish(), uninterrupted(CASE)) == []
    check_replays(run, CASE, launches=1)
