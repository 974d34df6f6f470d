# SPDX-License-Identifier: Apache-2.0
"""Faults on purpose in real jobs: what the next launch does, and what a script that fails says."""

import itertools
import signal

import pytest

from megatron_moevement.errors import ExitCode
from megatron_moevement.runtime.observation.events import EventName, Events, read_events
from tests.harness.interruption import Program, Run
from tests.harness.log_lines import log_lines
from tests.harness.protected_run import PROGRAM
from tests.harness.tiny_job import TINY, tiny_arguments

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]

ITERS = 8
ENDLESS = 100_000
KILLED = (-signal.SIGKILL,)
QUIET = "--moevement-no-progress-bar"


@pytest.fixture
def run(megatron_fork_server, tmp_path):
    """Returns a run of a tiny job, by its ranks and flags."""

    def of(world_size, *flags, train_iters=ITERS):
        program = Program(
            megatron_fork_server, PROGRAM, world_size, train_iters, (*TINY, QUIET, *flags)
        )
        return Run(program, tmp_path)

    return of


def ended(run, *flags):
    """Runs a job and returns how its ranks ended, and what they printed."""
    with run.start(*flags) as job:
        result = job.wait()
    assert not result.timed_out
    return result.exit_codes, "".join(rank.stderr for rank in result.ranks)


def injected(run):
    return [event for event in read_events(run.events) if event.event is EventName.FAULT_INJECTED]


def test_a_relaunch_passes_the_place_and_is_not_struck_again(run):
    job = run(1, "--save-interval=3", "--moevement-faults", "5:backward", "8:save")
    assert ended(job)[0] == KILLED
    assert ended(job)[0] == KILLED
    job.finish()
    assert [(one.iteration, one.fields["place"]) for one in injected(job)] == [
        (5, "backward"),
        (8, "save"),
    ]
    assert list(job.store.iterdir()) == []


def test_a_relaunch_that_is_told_of_no_faults_leaves_nothing_of_them(run):
    job = run(1)
    assert ended(job, "--moevement-faults", "5:backward")[0] == KILLED
    assert list(job.store.iterdir()) != []
    job.finish()
    assert list(job.store.iterdir()) == []


def test_a_fault_that_never_struck_fails_the_job_in_one_line_when_all_is_done(run):
    job = run(2, "--moevement-faults", "5:gather#1", "exception:3:fetch@1")
    codes, output = ended(job)
    assert codes == (ExitCode.FAILURE, ExitCode.FAILURE)
    (line,) = [line.text for line in log_lines(output) if "never struck" in line.text]
    assert line.startswith("--moevement-faults: kill:5:gather#1, exception:3:fetch@1 never struck")
    assert "Traceback" not in output
    assert list(job.checkpoints.glob("iter_0000008"))


def test_a_job_that_stops_before_the_step_of_a_fault_has_not_failed(run):
    job = run(1, "--moevement-faults", "7:barrier")
    job.finish("--exit-interval=5")
    assert injected(job) == []
    assert ended(job)[0] == KILLED


def test_a_fault_behind_the_start_is_told_and_no_failure(run):
    job = run(1)
    job.finish("--exit-interval=5")
    codes, output = ended(job, "--moevement-faults", "4:barrier")
    assert codes == (0,)
    assert "kill:4:barrier: this launch begins with the state of step 5" in output


def test_an_exception_in_the_backward_pass_fails_the_job(run):
    codes, output = ended(run(2, "--moevement-faults", "exception:3:backward@1"))
    assert set(codes) == {ExitCode.FAILURE}
    assert "InjectedFaultError: an exception on purpose" in output


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        ("--moevement-faults exception:3:backward", ExitCode.FAILURE, "InjectedFaultError: "),
        ("--moevement-faults exit:3:backward", ExitCode.FAILURE, ""),
        ("--load {}/none --exit-on-missing-checkpoint", ExitCode.BAD_ARGUMENTS, "no checkpoint"),
    ],
)
def test_a_process_that_fails_has_recorded_its_end_with_its_code(run, tmp_path, flags, code, text):
    job = run(1)
    codes, output = ended(job, *flags.format(tmp_path).split())
    assert codes == (code,)
    assert text in output
    ends = [one for one in read_events(job.events) if one.event is EventName.PROCESS_END]
    own, of_launcher = (one.fields for one in ends)
    assert own == {"code": code, "child": of_launcher["child"]}
    assert of_launcher["code"] == code


@pytest.mark.slow
def test_drawn_faults_strike_who_and_when_the_seed_says_over_several_launches(run):
    flags = ("--moevement-mtbf=4", "--moevement-fault-seed=3")
    job = run(2, *flags, train_iters=ENDLESS)
    for _ in range(3):
        codes, _ = ended(job)
        assert -signal.SIGKILL in codes
    settings = tiny_arguments(*flags, world_size=2).fault_injection
    schedule = [
        (fault.rank, fault.at.total_seconds())
        for fault in itertools.islice(settings.timed_faults(2), 1000)
    ]
    struck = [(one.logical_rank, one.fields["at_s"]) for one in injected(job)]
    assert len(struck) >= 3
    assert struck == [one for one in schedule if one in struck]


def test_a_trace_strikes_at_its_time(run, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("t_ms,event,node,alive_after\n0,init,1,1\n3600000,remove,a,0\n")
    flags = (f"--moevement-fault-trace={trace}", "--moevement-fault-trace-speed=1200")
    job = run(1, *flags, train_iters=ENDLESS)
    assert ended(job)[0] == KILLED
    (struck,) = injected(job)
    assert struck.fields == {"kind": "kill", "place": None, "at_s": 3.0}


class CutShortError(Exception):
    """What the building of a part raises in place of a peer's death."""


def cut_short():
    raise CutShortError


def rebuild_cut_short(folder):
    """Has a job built anew under scripted faults, which fails half-way."""
    from megatron_moevement.training.fault_injection import injected_faults  # noqa: PLC0415
    from tests.harness.tiny_job import tiny_job  # noqa: PLC0415

    flags = ("--moevement-faults=8:backward", f"--moevement-store-dir={folder}")
    with tiny_job(*flags) as job, pytest.raises(CutShortError), injected_faults(job, Events()):
        job.rebuild(cut_short)


def test_what_cuts_a_job_short_that_is_built_anew_is_not_hidden(megatron_fork_server, tmp_path):
    megatron_fork_server.run(rebuild_cut_short, world_size=1, args=[str(tmp_path)]).check()
