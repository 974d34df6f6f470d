# SPDX-License-Identifier: Apache-2.0
"""Flags of drawn faults: what they draw, and what they refuse."""

import itertools
from datetime import timedelta

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.policy.faults.fault_schedule import FaultKind, TimedFault
from tests.harness.tiny_job import tiny_arguments

TRACE = "t_ms,event,node,alive_after\n0,init,4,4\n60000,remove,a,3\n120000,remove,b,2\n"


def injection(*flags):
    return tiny_arguments(*flags, world_size=3).fault_injection


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return str(path)


def test_nothing_fails_by_itself():
    assert not injection().is_on
    assert list(injection().timed_faults(3)) == []


def test_a_rate_draws_faults_without_end():
    drawn = injection("--moevement-mtbf=5", "--moevement-fault-kinds", "stop", "exit")
    assert drawn.is_on
    faults = list(itertools.islice(drawn.timed_faults(3), 100))
    assert {fault.kind for fault in faults} == {FaultKind.STOP, FaultKind.EXIT}
    assert {fault.rank for fault in faults} == set(range(3))
    assert faults == list(itertools.islice(drawn.timed_faults(3), 100))
    other = injection("--moevement-mtbf=5", "--moevement-fault-seed=1")
    assert [f.rank for f in itertools.islice(other.timed_faults(3), 100)] != [
        fault.rank for fault in faults
    ]


def test_a_trace_is_replayed_at_a_speed(trace):
    drawn = injection(f"--moevement-fault-trace={trace}", "--moevement-fault-trace-speed=60")
    one, other = drawn.timed_faults(3)
    assert one == TimedFault(timedelta(seconds=1), one.rank, FaultKind.KILL)
    assert other.at == timedelta(seconds=2)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--moevement-mtbf 0", "0 is not from 0.001 to 1e9"),
        ("--moevement-mtbf -1", "-1 is not from 0.001"),
        ("--moevement-mtbf nan", "nan is not finite"),
        ("--moevement-mtbf 1e300", "1e300 is not from"),
        ("--moevement-mtbf soon", "'soon' is no number"),
        ("--moevement-mtbf 5 --moevement-fault-trace TRACE", "exclude each other"),
        ("--moevement-mtbf 5 --moevement-fault-kinds hang", "'hang' is none of kill, stop"),
        ("--moevement-mtbf 5 --moevement-fault-seed -1", "-1 is not at least 0"),
        ("--moevement-fault-seed 1", "-seed needs --moevement-mtbf or --moevement-fault-trace"),
        ("--moevement-fault-kinds stop", "-kinds needs --moevement-mtbf or"),
        ("--moevement-fault-trace-speed 2", "-speed needs --moevement-fault-trace FILE"),
        ("--moevement-mtbf 5 --moevement-fault-trace-speed 2", "-speed needs --moevement-fault-t"),
        ("--moevement-fault-trace TRACE --moevement-fault-trace-speed 0", "0 is not from 0.001"),
        ("--moevement-fault-trace TRACE.gone", "No such file"),
        ("--moevement-fault-trace FOLDER", "Is a directory"),
        ("--moevement-fault-trace README", "line 1: 'Nothing' begins no trace"),
        ("--moevement-fault-trace BINARY", "can't decode"),
    ],
)
def test_what_can_not_be_drawn_is_refused_in_one_line(tmp_path, trace, flags, reason):
    (tmp_path / "readme").write_text("Nothing\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, path in (
        ("TRACE", trace),
        ("FOLDER", str(tmp_path)),
        ("README", str(tmp_path / "readme")),
        ("BINARY", str(tmp_path / "binary")),
    ):
        flags = flags.replace(name, path)
    with pytest.raises(UserError) as refused:
        injection(*flags.split())
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
