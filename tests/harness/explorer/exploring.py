# SPDX-License-Identifier: Apache-2.0
"""Exploring: seed after seed is drawn, run, judged and noted."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.harness.explorer.mend import Mend
from tests.harness.explorer.oracle import judge
from tests.harness.explorer.results import Result, Results, result_of
from tests.harness.explorer.running import Runner
from tests.harness.explorer.scenario import Scenario, draw_scenario
from tests.harness.explorer.shrinking import shrink
from tests.harness.explorer.story import keep_story, write_scenario
from tests.harness.fork_server import ForkServer
from tests.harness.random_text import prepare_random_text

_PRELOAD = (
    "numpy",
    "torch.distributed",
    "tests.harness.fork_server_preload:import_megatron",
)
_QUIET = {"TORCH_CPP_LOG_LEVEL": "error", "PYTHONWARNINGS": "ignore"}


class Explorer:
    """Explores seeds; use it as made by `open_explorer`."""

    def __init__(self, runner: Runner, scratch: Path, text: Path, kept: Path, sources: str) -> None:
        """Explores nothing yet.

        Args:
            runner: runs scenarios.
            scratch: an empty folder, for runs; what they leave is removed.
            text: prefix of prepared text.
            kept: folder of stories.
            sources: digest of the sources.
        """
        self._runner = runner
        self._scratch = scratch
        self._text = text
        self._kept = kept
        self._sources = sources

    def explore(self, scenario: Scenario, tries: int) -> Result:
        """Runs and judges a scenario; keeps the story of a failure, and that of a smaller one.

        Args:
            scenario: what to run.
            tries: runs that shrinking may take.

        Raises:
            JobFailedError: the reference failed.
        """
        name = "story" if scenario.seed is None else f"seed-{scenario.seed}"
        with self._folder() as folder:
            outcome = self._runner.run(scenario, folder)
            complaints = judge(scenario, outcome)
            result = result_of(scenario, outcome, complaints, self._sources)
            if not complaints:
                return result
            story = self._kept / f"{name}-{self._sources}"
            keep_story(scenario, complaints, folder, self._text, story)
        if tries:
            wanted = {each.check for each in complaints}
            smaller = shrink(scenario, lambda one: bool(self._checks(one) & wanted), tries)
            write_scenario(smaller, story / "smaller.json")
        return dataclasses.replace(result, story=str(story))

    def _checks(self, scenario: Scenario) -> set[str]:
        """Returns which promises a scenario breaks."""
        with self._folder() as folder:
            return {each.check for each in judge(scenario, self._runner.run(scenario, folder))}

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def open_explorer(kept: Path, sources: str, without: Mend | None = None) -> Iterator[Explorer]:
    """Starts the fork server and prepares text; ends and removes both.

    Args:
        kept: folder of stories.
        sources: digest of the sources.
        without: the mend that struck jobs do without.
    """
    memory = Path("/dev/shm")  # noqa: S108  (private: mkdtemp makes a folder of its own)
    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch,
        ForkServer(_PRELOAD, _QUIET) as server,
    ):
        documents = Path(scratch) / "text"
        documents.mkdir()
        text = prepare_random_text(documents)
        yield Explorer(Runner(server, text, without), Path(scratch), text, kept, sources)


def explore_seeds(
    explorer: Explorer, seeds: Iterable[int], results: Results, *, tries: int, deadline: float
) -> Iterator[Result]:
    """Explores seeds until there are no more, or time is over; yields what came of each.

    Args:
        explorer: runs them.
        seeds: which.
        results: gets a line for each.
        tries: runs that shrinking a failure may take.
        deadline: of `time.monotonic`, at which no further seed begins.
    """
    for seed in seeds:
        if time.monotonic() >= deadline:
            return
        result = explorer.explore(draw_scenario(seed), tries)
        results.add(result)
        yield result
