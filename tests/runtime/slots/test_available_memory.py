# SPDX-License-Identifier: Apache-2.0
"""What a process may still take is what the machine has, or its control groups if that is less."""

import pytest

from megatron_moevement.runtime.slots.available_memory import available_memory_bytes

MIB = 2**20


@pytest.fixture
def machine(tmp_path):
    """Returns a function that says what a machine with 900 MiB and these groups has left."""
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal: 2048000 kB\nMemAvailable:   921600 kB\n")

    def left(memberships, groups=()):
        (tmp_path / "self" / "cgroup").write_text(memberships)
        for place, files in dict(groups).items():
            (tmp_path / "groups" / place).mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (tmp_path / "groups" / place / name).write_text(text)
        return available_memory_bytes(tmp_path, tmp_path / "groups") // MIB

    return left


def unified(limit_mib, used_mib, inactive_mib):
    limit = "max" if limit_mib is None else str(limit_mib * MIB)
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{used_mib * MIB}\n",
        "memory.stat": f"anon 5\ninactive_file {inactive_mib * MIB}\n",
    }


def test_without_limits_the_machine_decides(machine):
    assert machine("") == 900
    assert machine("0::/\n", {"": unified(None, 5, 1)}) == 900
    assert machine("0::/gone\n") == 900


def test_the_tightest_of_the_groups_above_a_process_counts(machine):
    groups = {
        "job_7": unified(600, 500, 50),
        "job_7/step_0": unified(None, 400, 0),
        "other": unified(10, 10, 0),
    }
    assert machine("0::/job_7/step_0\n", groups) == 150
    assert machine("0::/job_7/step_0\n", {"job_7": unified(600, 700, 50)}) == 0
    assert machine("0::/job_7/step_0\n", {"job_7": unified(5000, 500, 0)}) == 900


def test_groups_of_the_first_version_count(machine):
    files = {
        "memory.limit_in_bytes": str(300 * MIB),
        "memory.usage_in_bytes": str(120 * MIB),
        "memory.stat": f"cache 1\ntotal_inactive_file {20 * MIB}\n",
    }
    lines = "5:cpu,cpuacct:/x\n4:memory:/slurm/job_7\n0::/\n"
    assert machine(lines, {"memory/slurm": files, "x": unified(1, 1, 0)}) == 200
