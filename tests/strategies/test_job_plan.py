# SPDX-License-Identifier: Apache-2.0
"""The plan of a protected job: the same on every rank, with an account of every byte."""

import mmap

import pytest

LOG_BYTES = mmap.PAGESIZE + 1
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]


def make_plan(flags):
    """Returns what this rank knows of the plan, as JSON."""
    from megatron_moevement.integrations.megatron.snapshots import LiveOperators  # noqa: PLC0415
    from megatron_moevement.policy.copies.placement import Host  # noqa: PLC0415
    from megatron_moevement.strategies.moevement.protection.job_plan import agree_on_plan  # noqa: PLC0415
    from megatron_moevement.strategies.moevement.protection.members import Member  # noqa: PLC0415
    from megatron_moevement.training.protection import live_objects_of  # noqa: PLC0415
    from tests.harness.tiny_job import tiny_job  # noqa: PLC0415

    extras_bytes = 5000
    with tiny_job("--moevement-strategy=moevement", *flags) as job:
        one = live_objects_of(job)
        live = LiveOperators(one.chunks, one.optimizer)
        host = Host(one.process, job.launch.failure_domain, one.rank)
        member = Member.of(host, live.operators, extras_bytes, LOG_BYTES)
        assert Member.of_document(member.document()) == member
        plan = agree_on_plan(job.arguments.fault_tolerance, member, one.ends, 8, one.device)
        return {
            "schedule": plan.schedule.digest,
            "holders": {str(rank): list(held) for rank, held in plan.placement.holders.items()},
            "kept": [[str(rank) for rank in plan.kept_for(process)] for process in range(3)],
            "rings": {
                str(rank): [shape.capacity, shape.buffer_bytes, shape.total_bytes]
                for rank, shape in plan.rings.items()
            },
            "worst": {str(rank): max(sizes) for rank, sizes in plan.schedule.bytes_by_slot.items()},
            "accounts": {
                str(process): [
                    account.own_slots_bytes,
                    account.held_slots_bytes,
                    account.logs_bytes,
                    account.ledger_bytes,
                    account.total_bytes,
                ]
                for process, account in plan.accounts().items()
            },
            "journal": plan.journal.total_bytes,
        }


@pytest.fixture(params=["0", "1", "2"])
def plans(megatron_fork_server, request):
    flags = [
        "--use-distributed-optimizer",
        "--bf16",
        "--moevement-window=3",
        f"--moevement-replicas={request.param}",
    ]
    job = megatron_fork_server.run(make_plan, world_size=3, args=[flags])
    return int(request.param), job.check().values


def test_every_rank_makes_the_same_plan_and_every_byte_has_an_account(plans):
    replicas, found = plans
    plan = found[0]
    assert list(found) == [plan] * 3
    names = sorted(plan["rings"])
    assert len(names) == 3
    for process, rank in enumerate(names):
        own, held, logs, ledger, total = plan["accounts"][str(process)]
        assert len(plan["holders"][rank]) == replicas
        assert process not in plan["holders"][rank]
        kept = plan["kept"][process]
        assert kept == [other for other in names if process in plan["holders"][other]]
        assert own == plan["rings"][rank][2]
        assert held == sum(plan["rings"][other][2] for other in kept)
        assert ledger == plan["journal"]
        assert logs == (2 * 3 + 1) * 2 * mmap.PAGESIZE
        assert total == own + held + logs + ledger
    for rank, (capacity, buffer_bytes, total_bytes) in plan["rings"].items():
        assert capacity == 2 * 3 + 1
        assert buffer_bytes >= plan["worst"][rank] + 5000
        assert total_bytes > capacity * buffer_bytes


def plan_unlike(flags):
    """Returns what a rank says when one replica would give two experts each other's slot."""
    from megatron_moevement.strategies.moevement.protection.job_plan import UnlikePlansError  # noqa: PLC0415
    from tests.harness.recovery_mutations import MUTATIONS  # noqa: PLC0415

    MUTATIONS["differ-between-replicas"]()
    try:
        make_plan(flags)
    except UnlikePlansError as error:
        return str(error)
    return None


def test_a_slot_that_differs_between_replicas_is_noticed_by_all(megatron_fork_server, red):
    job = megatron_fork_server.run(plan_unlike, world_size=3, args=[["--moevement-window=3"]])
    (said,) = set(job.check().values)
    assert said.startswith("ranks 0 and 1 planned different windows")
    red("differ-between-replicas", said)
