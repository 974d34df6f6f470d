# SPDX-License-Identifier: Apache-2.0
"""A scenario: a job and what happens to it, drawn from a seed or read from a story."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

from tests.harness.explorer.drawn_history import draw_history
from tests.harness.explorer.drawn_job import draw_job
from tests.harness.explorer.history import (
    History,
    Launch,
    dump_history,
    load_history,
)
from tests.harness.explorer.job import (
    NO_ADOPTION,
    DrawnJob,
    Layout,
    Model,
    Protection,
    Source,
    Training,
)
from tests.harness.restarted_run import RESTARTABLE

_SOFT_S = 30.0
"""Where nobody hangs on purpose, a slow machine must not make a process look as if it did."""
_SOFT_WITH_HANGS_S = 10.0
_HEARTBEAT_S = 10.0
_BARRIER_S = 60.0
_HARD = 1.2
"""Times the soft time-out."""
_RUNS = 2
"""How many whole runs a healthy process may look as if it hung for: a machine may be busy."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A job and what happens to it.

    Attributes:
        seed: that it was drawn from; None: from none.
        job: what is trained.
        history: what happens to it.
    """

    seed: int | None
    job: DrawnJob
    history: History

    def launch_flags(
        self, launch: Launch, text: Path, folder: Path, run_s: float = 0.0
    ) -> tuple[str, ...]:
        """Returns the flags of a launch; where events and digest go is not among them.

        Args:
            launch: the launch.
            text: prefix of prepared text.
            folder: of the whole run.
            run_s: what the run without a fault took on this machine.
        """
        faults = ("--moevement-faults", *map(str, launch.faults)) if launch.faults else ()
        return (
            *self.job.training_flags(text),
            *self.job.protection_flags(),
            *self.job.saving_flags(folder / "checkpoints"),
            *self.job.tier_flags(folder / "tiers"),
            *(flag for flag in RESTARTABLE if flag != NO_ADOPTION),
            *time_outs(launch, run_s),
            f"--inprocess-active-world-size={self.job.layout.ranks}",
            f"--moevement-store-dir={folder / 'store'}",
            data_cache_flag(folder),
            "--log-interval=1",
            *faults,
        )

    def commands(self, text: Path, folder: Path) -> Iterator[str]:
        """Yields shell commands that come near to each launch, kills from outside excepted.

        Args:
            text: prefix of prepared text.
            folder: of the whole run.
        """
        for launch in self.history.launches:
            flags = shlex.join(self.launch_flags(launch, text, folder))
            yield f"./scripts/run_local.sh -n {self.job.layout.ranks} -s {launch.spares} -- {flags}"


def data_cache_flag(folder: Path) -> str:
    """Returns where indices of samples lie: mock data have millions, which take a while to shuffle.

    Args:
        folder: of the whole run, the one without a fault included.
    """
    return f"--data-cache-path={folder / 'index'}"


def soft_time_out_s(launch: Launch, run_s: float) -> float:
    """Returns the seconds without progress after which a process is interrupted."""
    return max(_SOFT_WITH_HANGS_S if launch.stops else _SOFT_S, _RUNS * run_s)


def barrier_time_out_s(launch: Launch, run_s: float) -> float:
    """Returns the seconds that a process waits at a barrier, or for one that never comes there."""
    return max(_BARRIER_S, 2 * _HARD * soft_time_out_s(launch, run_s))


def time_outs(launch: Launch, run_s: float) -> tuple[str, ...]:
    """Returns the flags of the times after which somebody counts as lost.

    Args:
        launch: the launch.
        run_s: what the run without a fault took on this machine.
    """
    hard = _HARD * soft_time_out_s(launch, run_s)
    times = {
        "soft-timeout": hard / _HARD,
        "hard-timeout": hard,
        "heartbeat-timeout": max(_HEARTBEAT_S, run_s),
        "barrier-timeout": barrier_time_out_s(launch, run_s),
        "completion-timeout": barrier_time_out_s(launch, run_s),
    }
    return tuple(f"--inprocess-{name}={seconds:.1f}" for name, seconds in times.items())


def draw_scenario(seed: int) -> Scenario:
    """Draws a scenario; the same seed gives the same one."""
    random = Random(seed)  # noqa: S311  (reproducible, not secret)
    job = draw_job(random)
    return Scenario(seed, job, draw_history(random, job))


def dump_scenario(scenario: Scenario) -> dict[str, Any]:
    """Returns a scenario as what JSON can hold."""
    job = dataclasses.asdict(scenario.job)
    job["training"]["source"] = scenario.job.training.source.value
    return {"seed": scenario.seed, "job": job, "history": dump_history(scenario.history)}


def load_scenario(document: Mapping[str, Any]) -> Scenario:
    """Returns the scenario of a document.

    Raises:
        ValueError: a value is none of those that there are.
        KeyError: something is missing.
        TypeError: something is strange.
    """
    job = document["job"]
    training = {**job["training"], "source": Source(job["training"]["source"])}
    return Scenario(
        document["seed"],
        DrawnJob(
            Layout(**job["layout"]),
            Model(**job["model"]),
            Training(**training),
            Protection(**job["protection"]),
        ),
        load_history(document["history"]),
    )
