"""Memory that is lost with its process, or does not read as it was written."""

import shutil
from random import Random

import pytest

from megatron_moevement.runtime.slots.ring_file import RingFile
from megatron_moevement.runtime.slots.store import process_folders, stored_rings
from megatron_moevement.testing.interruption import Run, digest_differences
from megatron_moevement.testing.protected_run import Case, check_replays, plans_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASE = Case.of("vpp2 fp16 distributed grouped", 3)
FOUR = Case.of("pp2-ep2 bf16 distributed", 2)


def killed_run(server, text, folder, case, *flags):
    run = Run(case.protected_program(server, text, *flags), folder)
    run.kill(case.protected_from + 1, Random(0))
    return run


def folders(run):
    (run_folder,) = run.store.iterdir()
    return process_folders(run_folder)


@pytest.mark.parametrize(
    "lost", [(0, 1), *(pytest.param(two, marks=pytest.mark.slow) for two in ((2, 3), (1, 2)))]
)
def test_the_memory_of_as_many_ranks_as_there_are_copies_may_be_lost(
    megatron_fork_server, text, uninterrupted, tmp_path, lost
):
    run = killed_run(megatron_fork_server, text, tmp_path, FOUR, "--moevement-replicas=2")
    for process in lost:
        shutil.rmtree(folders(run)[process])
    assert digest_differences(run.finish(), uninterrupted(FOUR)) == []
    check_replays(run, FOUR, launches=1)


def test_when_more_is_lost_the_durable_checkpoint_is_loaded_and_said_so(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    flags = ("--moevement-replicas=1", "--save-interval=4")
    run = killed_run(megatron_fork_server, text, tmp_path, FOUR, *flags)
    for process in (0, 1, 2):
        shutil.rmtree(folders(run)[process])
    with run.start() as job:
        result = job.wait().check()
    (plan,) = plans_of(run)
    assert plan["verdict"] == "ROLLBACK"
    said = [
        line for rank in result.ranks for line in rank.stderr.splitlines() if "ROLLBACK" in line
    ]
    assert len(said) == 1
    assert f"back to the durable checkpoint of step {plan['target']}" in said[0]
    assert plan["target"] == 4


def damage_every_slot(path, random):
    """Flips one bit in every slot that a ring holds."""
    ring = RingFile.open(path, None)
    records = ring.records()
    assert records
    for record in records:
        assert ring.damaged_parts(record) == ()
        part = random.choice([part for part in record.parts if part.size_bytes])
        place = part.offset + random.randrange(part.size_bytes)
        ring.payload(record)[place] ^= 1 << random.randrange(8)
        assert ring.damaged_parts(record) == (part.name,)
    ring.close()


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_flipped_bits_in_all_that_a_process_keeps_change_nothing(
    megatron_fork_server, text, uninterrupted, tmp_path, process
):
    run = killed_run(megatron_fork_server, text, tmp_path, CASE, "--moevement-replicas=1")
    random = Random(process)
    for stored in stored_rings(folders(run)[process]):
        damage_every_slot(stored.path, random)
    assert digest_differences(run.finish(), uninterrupted(CASE)) == []
    check_replays(run, CASE, launches=1)
