# SPDX-License-Identifier: Apache-2.0
"""Slots of consecutive states: each holds its state, however late its copies run."""

import dataclasses
import logging
from datetime import timedelta
from pathlib import Path

import pytest

from megatron_moevement.runtime.capture.capture import Capture
from megatron_moevement.runtime.observation.events import EventName, read_events
from megatron_moevement.strategies.moevement.capture import pace
from tests.harness.interruption import Run
from tests.harness.protected_run import Case

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]
STEPS = 20
COPIES_S = 0.05


def capture_late(folder, seed):
    from tests.harness.captured_windows import capture_windows  # noqa: PLC0415
    from tests.harness.late_stream import LateStream  # noqa: PLC0415

    return capture_windows(folder, STEPS, LateStream(seed))


def capture_without_waiting(folder, seed):
    Capture.await_copies = lambda self: timedelta()
    return capture_late(folder, seed)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_slot_holds_its_state_however_late_its_copies_run(megatron_fork_server, tmp_path, seed):
    job = megatron_fork_server.run(capture_late, world_size=1, args=[str(tmp_path), seed])
    ((wrong, checked, _),) = job.check().values
    assert wrong == []
    assert checked >= STEPS // 2


def test_without_the_wait_slots_are_of_no_state(megatron_fork_server, tmp_path):
    args = [str(tmp_path), 1]
    job = megatron_fork_server.run(capture_without_waiting, world_size=1, args=args)
    ((wrong, _, _),) = job.check().values
    assert wrong != []


def capture_slowly(folder):
    from tests.harness.captured_windows import capture_windows  # noqa: PLC0415
    from tests.harness.late_stream import LateStream  # noqa: PLC0415

    slow = LateStream(0, longest_wait_s=0.0, join_s=COPIES_S)
    _, _, stalls = capture_windows(folder, 5, slow)
    return stalls


def test_the_stall_is_as_long_as_the_copies_take(megatron_fork_server, tmp_path):
    """Of the longest, for a step may be late to wait; the ring has room for all of them."""
    job = megatron_fork_server.run(capture_slowly, world_size=1, args=[str(tmp_path)])
    (stalls,) = job.check().values
    assert len(stalls) == 4
    assert max(stalls) >= 0.8 * COPIES_S


def capture_over_a_slow_link(folder):
    from tests.harness.captured_windows import capture_over  # noqa: PLC0415
    from tests.harness.loopback_transport import Link  # noqa: PLC0415

    said = []
    logger = logging.getLogger(pace.__name__)
    logger.addFilter(lambda record: said.append(record.getMessage()))
    capture_over(folder, STEPS, Link(bandwidth_bytes_per_s=50e3))
    return said


def test_replication_that_is_slower_than_training_is_reported_once(megatron_fork_server, tmp_path):
    job = megatron_fork_server.run(capture_over_a_slow_link, world_size=1, args=[str(tmp_path)])
    ((said,),) = job.check().values
    assert said.startswith("replication is slower than training: up to step ")
    assert "raise --moevement-window, or --moevement-max-window where W is chosen" in said


def test_a_window_that_is_waited_for_now_and_then_is_not_reported(caplog):
    of_a_process = pace.Pace()
    for step in range(30):
        of_a_process.note(step, waited=step % 3 > 0)
    assert caplog.messages == []


@pytest.mark.slow
def test_the_stall_of_a_step_is_in_its_event(megatron_fork_server, text, tmp_path):
    """A step takes less than its copies, by far, so most of their second is waited for."""
    case = Case.of("vpp2 fp16 replicated grouped", 2)
    program = case.protected_program(megatron_fork_server, text, "--slow-copies")
    slow = dataclasses.replace(
        program, path=Path(__file__).with_name("slow_pretrain.py"), train_iters=4
    )
    run = Run(slow, tmp_path)
    run.finish()
    for rank in range(program.world_size):
        stalls = [
            event.fields["stall_s"]
            for event in read_events(run.events)
            if event.event is EventName.ITERATION and event.logical_rank == rank
        ]
        assert len(stalls) == 4
        assert max(stalls) >= 0.04
