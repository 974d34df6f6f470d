# SPDX-License-Identifier: Apache-2.0
"""What a run left with another layout is refused, with the flags that go on from it."""

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.runtime.slots.store_identity import RunIdentity
from megatron_moevement.runtime.stores.run_record import check_layout, write_run
from megatron_moevement.runtime.stores.store import JOURNAL_NAME

RUN = {"--lr": "1"}
SMALLEST, LARGEST = "--moevement-min-window", "--moevement-max-window"


def of_windows(smallest, largest):
    return RunIdentity(RUN, {SMALLEST: str(smallest), LARGEST: str(largest)})


def left(folder, identity):
    """Returns the folder of a run that a process left memory in."""
    process = folder / "process-0"
    process.mkdir()
    write_run(process, identity)
    (process / JOURNAL_NAME).touch()
    return folder


@pytest.mark.parametrize(
    ("former", "now", "flags"),
    [
        ((4, 4), (1, 8), "--moevement-window 4"),
        ((4, 4), (3, 3), "--moevement-window 4"),
        ((1, 8), (4, 4), f"{LARGEST} 8 {SMALLEST} 1"),
        ((1, 5), (1, 8), f"{LARGEST} 5"),
        ((4, 4), (1, 4), f"{SMALLEST} 4"),
    ],
)
def test_the_line_has_the_flags_of_the_launch_that_left_the_memory(tmp_path, former, now, flags):
    run = left(tmp_path, of_windows(*former))
    with pytest.raises(UserError) as error:
        check_layout([run], of_windows(*now))
    alone = " and without limits of W" if "--moevement-window" in flags else ""
    assert f"made with {flags}: launch with {flags}{alone} to go on" in str(error.value)


def test_memory_with_the_same_limits_or_of_another_run_is_not_refused(tmp_path):
    run = left(tmp_path, of_windows(1, 8))
    check_layout([run], of_windows(1, 8))
    check_layout([run], RunIdentity({"--lr": "2"}, of_windows(4, 4).layout))


def test_memory_without_a_journal_is_not_refused(tmp_path):
    run = left(tmp_path, of_windows(4, 4))
    (run / "process-0" / JOURNAL_NAME).unlink()
    check_layout([run], of_windows(1, 8))
