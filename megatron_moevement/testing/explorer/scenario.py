"""A scenario: a job and what happens to it, drawn from a seed or read from a story."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

from megatron_moevement.testing.explorer.drawn_history import draw_history
from megatron_moevement.testing.explorer.drawn_job import draw_job
from megatron_moevement.testing.explorer.history import (
    History,
    Launch,
    dump_history,
    load_history,
)
from megatron_moevement.testing.explorer.job import (
    NO_ADOPTION,
    DrawnJob,
    Layout,
    Model,
    Protection,
    Source,
    Training,
)
from megatron_moevement.testing.restarted_run import RESTARTABLE

_PATIENT = ("--inprocess-soft-timeout=30", "--inprocess-hard-timeout=36")
"""Where nobody hangs on purpose, a slow machine must not make a process look as if it did."""
_HANGS = ("--inprocess-soft-timeout=10", "--inprocess-hard-timeout=13")
_BARRIERS = ("--inprocess-barrier-timeout=60", "--inprocess-completion-timeout=60")


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

    def launch_flags(self, launch: Launch, text: Path, folder: Path) -> tuple[str, ...]:
        """Returns the flags of a launch; where events and digest go is not among them.

        Args:
            launch: the launch.
            text: prefix of prepared text.
            folder: of the whole run.
        """
        faults = ("--moevement-faults", *map(str, launch.faults)) if launch.faults else ()
        return (
            *self.job.training_flags(text),
            *self.job.protection_flags(),
            *self.job.saving_flags(folder / "checkpoints"),
            *(flag for flag in RESTARTABLE if flag != NO_ADOPTION),
            *(_HANGS if launch.stops else _PATIENT),
            *_BARRIERS,
            f"--inprocess-active-world-size={self.job.layout.ranks}",
            f"--moevement-store-dir={folder / 'store'}",
            f"--data-cache-path={folder / 'index'}",
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
