# SPDX-License-Identifier: Apache-2.0
"""The running of scenarios: the reference, and launch after launch with what strikes it."""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_moevement.errors import ExitCode
from megatron_moevement.runtime.observation.events import EventName, EventRecord, read_events
from tests.harness.explorer.history import Kill, Launch
from tests.harness.explorer.mend import Mend
from tests.harness.explorer.outcome import (
    NEVER_STRUCK,
    Killed,
    LaunchOutcome,
    Outcome,
    read_digest,
)
from tests.harness.explorer.scenario import (
    Scenario,
    barrier_time_out_s,
    data_cache_flag,
    soft_time_out_s,
)
from tests.harness.fork_server import ForkServer, Job, JobFailedError, JobResult
from tests.harness.protected_run import PROGRAM

MOST_RELAUNCHES = 2
"""Beyond those that are drawn, for a job that stopped with its memory kept."""
_REFERENCE_LIMIT_S = 600.0
_START_S = 45.0
"""For a launch and each restart, beyond what its steps may take."""
_SLOWER = 12
"""How many times longer than the reference the steps of a struck launch may take."""
_POLL_S = 0.03
_ORPHANS_S = 20.0
"""For the monitor of a killed process to end, once it has waited at a barrier for all others."""
_ENV = {"OMP_NUM_THREADS": "1"}
_EXPLORED = Path(__file__).with_name("explored_pretrain.py")


class Runner:
    """Runs scenarios, one at a time; references are kept by what decides their bits."""

    def __init__(self, server: ForkServer, text: Path, without: Mend | None = None) -> None:
        """Runs nothing yet.

        Args:
            server: forks processes that have Megatron imported.
            text: prefix of prepared text.
            without: the mend that struck jobs do without.
        """
        self._server = server
        self._text = text
        self._without = () if without is None else (f"--without={without.value}",)
        self._references: dict[tuple[str, ...], tuple[dict[str, Any], float]] = {}

    def run(self, scenario: Scenario, folder: Path) -> Outcome:
        """Runs a scenario to its end.

        Args:
            scenario: what to run.
            folder: an empty one, for all that is written.

        Raises:
            JobFailedError: the reference failed, which nothing had struck.
        """
        reference, seconds = self._reference(scenario, folder)
        digest = folder / "digest.json"
        launches: list[LaunchOutcome] = []
        more = (Launch(),) * MOST_RELAUNCHES
        drawn = scenario.history.launches
        for number, launch in enumerate((*drawn, *more)):
            place = folder / f"launch{number}"
            (place / "events").mkdir(parents=True)
            flags = scenario.launch_flags(launch, self._text, folder, seconds)
            strikes = len(launch.faults) + len(launch.kills)
            patience_s = _START_S + 2 * soft_time_out_s(launch, seconds) * launch.stops
            limit_s = patience_s * (2 + strikes) + _SLOWER * seconds
            extra = (*self._without, *scenario.job.protection.surrounding_flags)
            struck = _StruckLaunch(scenario, launch, folder, place)
            with self._server.start_program(
                _EXPLORED if extra else PROGRAM,
                [
                    *extra,
                    *flags,
                    f"--moevement-event-dir={place / 'events'}",
                    f"--moevement-state-digest={digest}",
                ],
                world_size=scenario.job.layout.ranks + launch.spares,
                timeout_s=limit_s,
                orphans_s=_ORPHANS_S + barrier_time_out_s(launch, seconds),
                env=_ENV,
            ) as job:
                launches.append(struck.run(job))
            if launches[-1].timed_out or not _goes_on(launches[-1]):
                break
        return Outcome(tuple(launches), reference, read_digest(digest))

    def _reference(self, scenario: Scenario, folder: Path) -> tuple[dict[str, Any], float]:
        flags = scenario.job.training_flags(self._text)
        if flags not in self._references:
            digest, began = folder / "reference.json", time.monotonic()
            result = self._server.run_program(
                PROGRAM,
                [*flags, data_cache_flag(folder), f"--moevement-state-digest={digest}"],
                world_size=scenario.job.layout.ranks,
                timeout_s=_REFERENCE_LIMIT_S,
                env=_ENV,
            ).check()
            found = read_digest(digest)
            if found is None:
                raise JobFailedError(result.describe())
            self._references[flags] = found, time.monotonic() - began
        return self._references[flags]


def _goes_on(launch: LaunchOutcome) -> bool:
    """Returns whether the job is to be launched again: nobody has trained it to its end."""
    if ExitCode.DONE in launch.exit_codes:
        return False
    return not any(NEVER_STRUCK in launch.output(process) for process in range(len(launch.pids)))


class _StruckLaunch:
    """One launch, from its start to its end."""

    def __init__(self, scenario: Scenario, launch: Launch, folder: Path, place: Path) -> None:
        self._scenario = scenario
        self._launch = launch
        self._folder = folder
        self._place = place
        self._killed: list[Killed] = []
        self._pending = sorted(launch.kills, key=lambda kill: kill.step)
        self._due: float | None = None

    def run(self, job: Job) -> LaunchOutcome:
        """Strikes the launch when its times come, and returns what it left."""
        began = time.monotonic()
        self._strike(job)
        result = job.wait()
        for file in job.folder.glob("rank*.std*"):
            shutil.copy(file, self._place)
        return self._outcome(job, result, time.monotonic() - began)

    def _strike(self, job: Job) -> None:
        """Kills from outside whom the history names, when their times come."""
        began = time.monotonic()
        while self._pending and not job.has_ended:
            job.poll()
            kill = self._pending[0]
            if self._due is None and (kill.step == 0 or self._has_come(kill.step)):
                self._due = (began if kill.step == 0 else time.monotonic()) + kill.after_s
            if self._due is not None and time.monotonic() >= self._due:
                self._kill(job, kill)
                self._pending.pop(0)
                self._due = None
            time.sleep(_POLL_S)

    def _has_come(self, step: int) -> bool:
        return any(
            event.event is EventName.ITERATION and event.iteration >= step
            for event in self._events()
        )

    def _events(self) -> list[EventRecord]:
        return read_events(self._place / "events")

    def _kill(self, job: Job, kill: Kill) -> None:
        processes = self._processes(job, kill)
        # Stopped first: none of them lives to see another one dead.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in processes:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    job.kill(process, number)
        at = time.time()
        if not job.has_ended:
            for process in processes:
                job.wait_for_rank(process)
        self._killed += [Killed(process, at, kill.forgets) for process in processes]
        if kill.forgets:
            for process in processes:
                for folder in (self._folder / "store").glob(f"*/process-{process}"):
                    shutil.rmtree(folder, ignore_errors=True)

    def _processes(self, job: Job, kill: Kill) -> list[int]:
        """Returns the numbers of the processes that are struck; those that are dead can't be."""
        if kill.ranks is None:
            return list(range(len(job.pids)))
        occupants: Mapping[int, int] = {event.logical_rank: event.pid for event in self._events()}
        found = [
            job.pids.index(occupants[rank]) if rank in occupants else rank for rank in kill.ranks
        ]
        return sorted(set(found))

    def _outcome(self, job: Job, result: JobResult, seconds: float) -> LaunchOutcome:
        store = self._folder / "store"
        left = sorted(str(path.relative_to(store)) for path in store.rglob("*"))
        return LaunchOutcome(
            launch=self._launch,
            folder=self._place,
            pids=job.pids,
            exit_codes=result.exit_codes,
            timed_out=result.timed_out,
            seconds=seconds,
            killed=tuple(self._killed),
            missed=len(self._pending),
            left=tuple(left),
            orphans=result.orphans,
        )
