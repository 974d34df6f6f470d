# SPDX-License-Identifier: Apache-2.0
"""What is captured and reserved is what was announced, byte for byte."""

import pytest

from megatron_moevement.policy.job.operators import Inventory, Operator, OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import WindowSchedule
from megatron_moevement.runtime.observation.events import EventName, read_events
from megatron_moevement.runtime.slots.slot_record import EXTRAS
from megatron_moevement.runtime.slots.store_identity import RUN_NAME
from megatron_moevement.runtime.stores.status_file import STATUS_NAME
from megatron_moevement.runtime.stores.store import LOCK_NAME, RingRole, process_folders
from megatron_moevement.runtime.stores.store_listing import survey
from megatron_moevement.settings.faults import FaultPoint
from tests.harness.interruption import Run
from tests.harness.protected_run import Case, die

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]

UNANNOUNCED = (LOCK_NAME, RUN_NAME, STATUS_NAME)
"""A few kilobytes that tell whose files the others are."""
FILE_SYSTEMS_OWN_BYTES = 16384
SMALL = Case.of("vpp2 fp16 replicated grouped", 2)
CASES = [
    SMALL,
    pytest.param(Case.of("edp3 bf16 distributed-overlap bias", 3), marks=pytest.mark.slow),
    pytest.param(Case.of("pp2-ep2 fp32 distributed", 5), marks=pytest.mark.slow),
]


def announce(flags):
    """Returns what the plan of a job says of this rank: operators, slots and bytes."""
    from megatron_moevement.integrations.megatron.snapshots import LiveOperators  # noqa: PLC0415
    from megatron_moevement.strategies.moevement.opening import plan_job  # noqa: PLC0415
    from megatron_moevement.training.protection import live_objects_of  # noqa: PLC0415
    from tests.harness.tiny_job import tiny_job  # noqa: PLC0415

    with tiny_job(*flags, base=()) as job:
        one = live_objects_of(job)
        live = LiveOperators(one.chunks, one.optimizer)
        plan = plan_job(
            job.arguments.fault_tolerance,
            one,
            domain=job.launch.failure_domain,
            train_iters=int(job.arguments.run.train_iters),
        )
        account = plan.accounts()[one.process]
        slots = {str(operator): slot for operator, slot in plan.schedule.slots.items()}
        return {
            "operators": [
                [slots[str(one.id)], one.full_bytes, one.compute_bytes] for one in live.operators
            ],
            "by_slot": plan.schedule.bytes_by_slot[one.rank],
            "host_bytes": account.total_bytes,
            "file_bytes": account.total_bytes - account.logs_bytes,
            "log_bytes": one.log_bytes,
        }


@pytest.fixture
def announced(megatron_fork_server):
    def of(program):
        flags = [*program.flags, f"--train-iters={program.train_iters}"]
        size = program.world_size
        return megatron_fork_server.run(announce, world_size=size, args=[flags]).check().values

    return of


def metadata_of(store):
    """Returns the bytes of what lies beside the tensors of each slot, by process and step."""
    (run,) = survey(store)
    return {
        (process.process, slot.record.step): slot.record.part(EXTRAS).size_bytes
        for process in run.processes
        for ring in process.rings
        if ring.role is RingRole.OWN
        for slot in ring.slots
    }


@pytest.mark.parametrize("case", CASES)
def test_every_step_captures_its_slot_and_the_files_are_as_large_as_announced(
    megatron_fork_server, text, announced, tmp_path, case
):
    program = case.protected_program(megatron_fork_server, text)
    plans = announced(program)
    for plan in plans:
        for slot, size in enumerate(plan["by_slot"]):
            full = sum(full for at, full, _ in plan["operators"] if at == slot)
            assert size == full + sum(least for at, _, least in plan["operators"] if at > slot) > 0
    run = Run(program, tmp_path)
    die(run, case, FaultPoint.BARRIER, [case.protected_from + case.window + 1])
    steps = [event for event in read_events(run.events) if event.event is EventName.ITERATION]
    assert len(steps) >= (case.protected_from + case.window) * program.world_size
    for event in steps:
        plan = plans[event.logical_rank]
        assert event.fields["captured_bytes"] == plan["by_slot"][event.iteration % case.window]
        assert event.fields["host_bytes"] == plan["host_bytes"]
        assert event.fields["log_bytes"] == plan["log_bytes"]
    written = metadata_of(run.store)
    assert len(written) >= case.window * program.world_size
    told = {
        (event.logical_rank, event.iteration): event.fields["metadata_bytes"] for event in steps
    }
    assert written == {place: told[place] for place in written}
    (run_folder,) = run.store.iterdir()
    for process, folder in process_folders(run_folder).items():
        files = [path.stat() for path in folder.iterdir() if path.name not in UNANNOUNCED]
        assert sum(file.st_size for file in files) == plans[process]["file_bytes"]
        # Reserved, not only promised; a file system counts in blocks, and some for itself.
        used = sum(file.st_blocks * 512 for file in files)
        assert abs(used - plans[process]["file_bytes"]) <= FILE_SYSTEMS_OWN_BYTES * len(files)


def test_a_job_that_would_take_too_much_memory_is_refused_with_the_numbers(
    megatron_fork_server, text, announced, tmp_path
):
    program = SMALL.protected_program(megatron_fork_server, text)
    needed = max(plan["host_bytes"] for plan in announced(program))
    run = Run(program, tmp_path)
    with run.start(f"--moevement-host-memory-limit-gb={(needed - 1) / 1e9!r}") as job:
        result = job.wait()
    assert result.exit_codes == (2, 2)
    (line,) = [one for one in result.ranks[0].stderr.splitlines() if "host memory" in one]
    assert f"needs {needed} bytes of host memory and may take {needed - 1}" in line
    assert (
        "lower --moevement-replicas, give --moevement-window a smaller W, or raise the budget"
        in line
    )
    assert not list(run.store.rglob("*.ring"))
    die(run, SMALL, FaultPoint.BARRIER, [2])
    with run.start(f"--moevement-host-memory-limit-gb={(needed + 1) / 1e9!r}") as job:
        job.wait().check()


@pytest.mark.parametrize("window", [1, 2, 3, 4, 6, 12])
def test_equal_operators_give_the_bytes_of_the_formula(window):
    count, weights = 12, 1000
    experts = [OperatorId(OperatorKind.EXPERT, 0, number) for number in range(count)]
    rank = LogicalRank()
    operators = tuple(Operator(one, 12 * weights, 2 * weights) for one in experts)
    slots = {one: number * window // count for number, one in enumerate(experts)}
    schedule = WindowSchedule(Inventory({rank: operators}), window, slots)
    for slot, size in enumerate(schedule.bytes_by_slot[rank]):
        per_weight = 12 / window + 2 * (window - slot - 1) / window
        assert size == pytest.approx(per_weight * weights * count, rel=1e-12)
