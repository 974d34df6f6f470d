# SPDX-License-Identifier: Apache-2.0
"""A restart in place that has lost more than there are copies goes on from the newest tier."""

import re
import shutil
import socket
from pathlib import Path

import pytest

from megatron_moevement.errors import ExitCode
from megatron_moevement.policy.facts.facts_document import FACTS, load_facts
from megatron_moevement.runtime.observation.events import EventName, kept_documents
from megatron_moevement.runtime.stores.store import process_folders
from megatron_moevement.runtime.tiers.manifests import whole_tiers
from megatron_moevement.runtime.tiers.marks import leave_mark
from tests.harness.interruption import digest_differences
from tests.harness.log_lines import log_lines
from tests.harness.protected_run import plans_of
from tests.harness.restarted_run import events_of

from .test_tiers import CASE, RUN_ID, TieredRun, kill_with_two_tiers, restartable
from .unreadable_tier_pretrain import PLACE

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

UNREADABLE = Path(__file__).with_name("unreadable_tier_pretrain.py")


@pytest.mark.slow
def test_tiers_that_are_damaged_take_nothing_from_memory(
    megatron_fork_server, text, tmp_path, uninterrupted
):
    """A rank's memory is lost; the ledger of the others leads to the newest step all the same."""
    flags = ("--moevement-replicas=0", "--save-interval=5")
    run = TieredRun(megatron_fork_server, text, tmp_path, *flags)
    kill_with_two_tiers(run, ahead=2)
    (run_folder,) = run.store.iterdir()
    shutil.rmtree(process_folders(run_folder)[1])
    newest = run.newest.committed
    for path in Path(run.target.place).rglob("pp1*.slots"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert digest_differences(run.finish(), uninterrupted(CASE)) == []
    assert run.taken[0] > newest


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["nowhere", "listing", "loading"])
def test_a_restart_without_a_copy_goes_on_from_a_tier_that_it_can_read(
    megatron_fork_server, text, tmp_path, uninterrupted, failing
):
    program = {"path": UNREADABLE, "env": {PLACE: failing}}
    flags = ("--moevement-replicas=0", "--moevement-no-adoption")
    run = TieredRun(megatron_fork_server, text, tmp_path, *flags, make=restartable, **program)
    with run.start() as job:
        while len(whole_tiers(run.target)) < 2 and not job.has_ended:
            job.poll()
        newest = run.newest.committed
        job.kill(1)
        result = job.wait()
    assert sorted(result.exit_codes) == [-9, 0, 0], result.describe()
    assert digest_differences(run._digest(), uninterrupted(CASE)) == []
    plans = [(plan["verdict"], plan["target"]) for plan in plans_of(run)]
    said = "".join(rank.stdout + rank.stderr for rank in result.ranks)
    if failing == "nowhere":
        assert plans[-1][0] == "GLOBAL"
        assert plans[-1][1] >= newest
        facts = [
            load_facts(path.read_text(), path.name) for path in kept_documents(run.events, FACTS)
        ]
        assert facts[-1].generation == 1
        logs = [log for process in facts[-1].processes for log in process.logs]
        assert not any(log.steps for log in logs)  # of the steps that were given up
        line = re.search(r"goes on from the tier of step \d+ in \S+; (\d+) committed steps", said)
        assert int(line[1]) == plans_of(run)[-1]["lost_steps"]
    else:
        assert "goes on from the tier" not in said
        assert {"listing": "Input/output error", "loading": "the target hung up"}[failing] in said
        assert "the restart goes on without a tier" in said


APART = UNREADABLE.with_name("apart_tiers_pretrain.py")


def test_ranks_with_a_disk_each_are_refused_at_the_start_with_their_hosts(
    megatron_fork_server, text, tmp_path
):
    run = TieredRun(megatron_fork_server, text, tmp_path, path=APART)
    with run.start() as job:
        result = job.wait()
    assert set(result.exit_codes) == {ExitCode.BAD_ARGUMENTS}, result.describe()
    output = "".join(rank.stderr for rank in result.ranks)
    (line,) = [one.text for one in log_lines(output) if one.level == "ERROR"]
    host = socket.gethostname()
    assert f"{tmp_path}/tiers-0/{RUN_ID} is not the same folder for all ranks" in line
    assert f"rank 1; on {host}) is not what rank 0 on {host} sees" in line
    assert not list(tmp_path.glob("tiers-*/*/*"))
    assert events_of(run, EventName.ITERATION, None) == []


def test_a_target_that_fails_at_the_start_is_a_line_and_nothing_more(
    megatron_fork_server, text, tmp_path
):
    run = TieredRun(megatron_fork_server, text, tmp_path, place="/proc/refuses")
    with run.start("--exit-interval=6") as job:
        result = job.wait().check()
    (line,) = [one for one in result.ranks[0].stderr.splitlines() if "is not known" in one]
    assert "--moevement-tier-dir /proc/refuses" in line
    assert "No such file" in line
    assert "is not known" not in "".join(rank.stderr for rank in result.ranks[1:])


def test_a_good_target_is_seen_by_all_and_nothing_of_that_stays(
    megatron_fork_server, text, tmp_path
):
    run = TieredRun(megatron_fork_server, text, tmp_path)
    leave_mark(run.target, "a launch that was killed before", 1)
    with run.start("--exit-interval=6") as job:
        result = job.wait().check()
    assert "is not known" not in "".join(rank.stderr for rank in result.ranks)
    assert [name for name in run.target.names() if name.startswith("marks")] == []
