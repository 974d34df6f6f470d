# SPDX-License-Identifier: Apache-2.0
"""What the oracle demands of the ends of a job: exit codes, time, output, and what is left."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterator

from megatron_moevement.errors import ExitCode
from megatron_moevement.policy.faults.fault_schedule import FaultKind
from megatron_moevement.runtime.observation.events import EventName
from tests.harness.explorer.outcome import NEVER_STRUCK, Killed, LaunchOutcome, Outcome
from tests.harness.explorer.scenario import Scenario
from tests.harness.explorer.timeline import Timeline
from tests.harness.fault_cover_run import EXIT_CODES

_ON_PURPOSE = "on purpose"
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(?P<error>.*)")
_STOPS = re.compile(r"^process \d+ stops: ", re.MULTILINE)


def check_time(scenario: Scenario, outcome: Outcome, timeline: Timeline) -> Iterator[str]:
    """Checks that nothing hung: no launch had to be ended."""
    del scenario
    for number, launch in enumerate(outcome.launches):
        if launch.timed_out:
            last = max((event.iteration for event in timeline.events[number]), default=0)
            yield f"launch {number} had not ended after {launch.seconds:.0f} s, at step {last}"


def check_ends(scenario: Scenario, outcome: Outcome, timeline: Timeline) -> Iterator[str]:
    """Checks how each process ended: as it was struck, else with the job."""
    del scenario, timeline
    for number, launch in enumerate(outcome.launches):
        if launch.timed_out:
            continue
        yield from _ends_of(number, launch)
    last = outcome.launches[-1]
    if not last.timed_out and not _good(last) & set(last.exit_codes):
        yield f"the last launch ended with {last.exit_codes}"


def _good(launch: LaunchOutcome) -> set[int]:
    """Returns the codes with which a job that has trained to its end may end.

    Where a fault never struck, its ranks say so with one of their own; spares have nothing to say.
    The rank that prints why may be killed just then.
    """
    said = any(NEVER_STRUCK in launch.output(process) for process in range(len(launch.pids)))
    never = set(launch.launch.faults).difference(fault for _, fault in launch.struck())
    is_failure = said or (never and launch.killed)
    return {ExitCode.DONE, ExitCode.FAILURE} if is_failure else {ExitCode.DONE}


def _ends_of(number: int, launch: LaunchOutcome) -> Iterator[str]:
    struck: dict[int, set[int]] = {}
    for process, fault in launch.struck():
        if fault.kind is not FaultKind.EXCEPTION:
            struck.setdefault(launch.pids[process], set()).update(EXIT_CODES[fault.kind])
    for killed in launch.killed:
        struck.setdefault(launch.pids[killed.process], set()).add(-signal.SIGKILL)
    good, others = _good(launch), Counter[int]()
    for process, (pid, code) in enumerate(zip(launch.pids, launch.exit_codes, strict=True)):
        if code in struck.get(pid, set()):
            continue
        if _STOPS.search(launch.output(process)) and code == ExitCode.FAILURE:
            continue  # it stops with the others, and has nothing to go on with
        others[code] += 1
        if code not in good | {ExitCode.STATE_FLUSHED}:
            was = "struck" if pid in struck else "not struck"
            yield f"launch {number}: process {process}, which was {was}, ended with {code}"
    if ExitCode.STATE_FLUSHED in others and others.keys() & good:
        yield f"launch {number}: some processes stopped while others trained to the end: {others}"


def check_restarts(scenario: Scenario, outcome: Outcome, timeline: Timeline) -> Iterator[str]:
    """Checks that each restart has a strike that it comes from."""
    del scenario
    for number, launch in enumerate(outcome.launches):
        struck = len(launch.struck()) + len(launch.killed)
        restarts = timeline.restarts(number)
        if restarts > struck:
            yield f"launch {number}: {restarts} restarts came of {struck} strikes"


def check_output(scenario: Scenario, outcome: Outcome, timeline: Timeline) -> Iterator[str]:
    """Checks that nobody printed a traceback of anything but a fault on purpose."""
    del scenario, timeline
    for number, launch in enumerate(outcome.launches):
        for process in range(len(launch.pids)):
            if launch.timed_out:
                continue
            errors = [found["error"] for found in _TRACEBACK.finditer(launch.output(process))]
            strange = [error for error in errors if _ON_PURPOSE not in error]
            if strange:
                yield f"launch {number}: process {process} printed a traceback: {strange[0][:200]}"


def check_leftovers(scenario: Scenario, outcome: Outcome, timeline: Timeline) -> Iterator[str]:
    """Checks that no process outlives its launch, and that a job that is done leaves no file.

    A listening socket is gone with its process. Who is killed from outside when all steps are
    trained and nobody trains after it leaves its memory: nobody is there who would remove it. Of
    one whose memory is lost, too, the folder of the run may be left.
    """
    for number, launch in enumerate(outcome.launches):
        if launch.orphans and not launch.timed_out:
            yield f"launch {number}: it is over, and these are left: {'; '.join(launch.orphans)}"
    last = outcome.launches[-1]
    if last.timed_out or outcome.digest is None:
        return
    killed = list(_killed_behind_all_steps(scenario, timeline))
    excused = {f"process-{one.process}" for one in killed}
    folders = [path.split("/")[1] for path in last.left if "/" in path]
    is_excused = excused.issuperset(folders) and (folders or any(one.forgot for one in killed))
    if last.left and not is_excused:
        yield f"{len(last.left)} files are left in the store directory: {', '.join(last.left[:4])}"
    flushed = last.folder.parent / "checkpoints" / "moevement" / "flushed"
    if flushed.exists() and any(flushed.iterdir()):
        yield f"flushed memory is left in {flushed}"


def _killed_behind_all_steps(scenario: Scenario, timeline: Timeline) -> Iterator[Killed]:
    """Yields who was killed in the last launch when every step was reported, and none later."""
    number = len(timeline.launches) - 1
    steps = timeline.of(number, EventName.ITERATION)
    done = [step.time for step in steps if step.iteration >= scenario.job.training.steps]
    for killed in timeline.launches[number].killed:
        later = [recovery for recovery in timeline.recoveries if recovery.time > killed.time]
        if done and min(done) <= killed.time and not later:
            yield killed
