"""Slots of consecutive states: each holds its state, however late its copies run."""

from datetime import timedelta

import pytest

from megatron_moevement.runtime.capture import Capture

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]
STEPS = 20


def capture_late(folder, seed):
    from megatron_moevement.testing.captured_windows import capture_windows  # noqa: PLC0415

    return capture_windows(folder, seed, STEPS)


def capture_without_waiting(folder, seed):
    Capture.await_copies = lambda self: timedelta()
    return capture_late(folder, seed)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_slot_holds_its_state_however_late_its_copies_run(megatron_fork_server, tmp_path, seed):
    job = megatron_fork_server.run(capture_late, world_size=1, args=[str(tmp_path), seed])
    ((wrong, checked),) = job.check().values
    assert wrong == []
    assert checked >= STEPS // 2


def test_without_the_wait_slots_are_of_no_state(megatron_fork_server, tmp_path):
    args = [str(tmp_path), 1]
    job = megatron_fork_server.run(capture_without_waiting, world_size=1, args=args)
    ((wrong, _),) = job.check().values
    assert wrong != []
