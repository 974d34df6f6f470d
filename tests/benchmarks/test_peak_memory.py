# SPDX-License-Identifier: Apache-2.0
"""What a process takes is parted by what its areas of memory are."""

from collections import Counter
from pathlib import Path

import pytest

from tests.harness.benchmarks import benchmark

FOLDER = Path("/dev/shm/job")


@pytest.fixture(scope="module")
def peak_memory():
    return benchmark("peak_memory")


def area(name, kib, flags="rd wr"):
    """Returns the lines of an area in /proc/PID/smaps that count, and one that doesn't."""
    lines = (f"7f00-7f01 rw-p 0 00:01 7  {name}", f"Rss: {9 * kib} kB", f"Pss: {kib} kB")
    return "\n".join((*lines, f"VmFlags: {flags}\n"))


@pytest.mark.parametrize(
    ("name", "flags", "part"),
    [
        ("", "rd wr", "other memory of processes"),
        ("[heap]", "rd wr", "other memory of processes"),
        ("/dev/zero (deleted)", "rd wr", "other memory of processes"),
        ("", "rd wr dc", "upstream log"),
        ("/usr/lib/libc.so", "rd ex", "mapped files on disk"),
        ("/dev/shm/job/store/#17 (deleted)", "rd wr sh", "other files of the job"),
    ],
)
def test_an_area_belongs_to_one_part(peak_memory, name, flags, part):
    assert peak_memory.process_parts(area(name, 3, flags), FOLDER) == Counter({part: 3072})


def test_a_named_file_of_the_job_counts_by_its_size_and_not_again_where_it_is_mapped(
    peak_memory, tmp_path
):
    ring = tmp_path / "process-0" / "own-pp0.dp0.tp0.cp0.ep0.ring"
    assert peak_memory.process_parts(area(str(ring), 3), tmp_path) == Counter()
    assert peak_memory.part_of_file(ring.name) == "rings of own slots"


def test_areas_of_one_part_add_up(peak_memory):
    smaps = area("", 3) + area("[heap]", 4)
    found = peak_memory.process_parts(smaps, FOLDER)
    assert found == Counter({"other memory of processes": 7 * 1024})
