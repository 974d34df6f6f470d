# SPDX-License-Identifier: Apache-2.0
"""The story of a failure: all that is needed to look into it, and to run it again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from megatron_moevement.errors import UserError
from tests.harness.explorer.oracle import Complaint
from tests.harness.explorer.scenario import Scenario, dump_scenario, load_scenario

SCENARIO = "scenario.json"


def keep_story(
    scenario: Scenario, complaints: Iterable[Complaint], ran_in: Path, text: Path, story: Path
) -> None:
    """Keeps what a failure left: scenario, commands, complaints, output, events and facts.

    Args:
        scenario: that failed.
        complaints: of the oracle.
        ran_in: folder of the run.
        text: prefix of prepared text.
        story: folder of the story; what is there is replaced.
    """
    shutil.rmtree(story, ignore_errors=True)
    story.mkdir(parents=True)
    write_scenario(scenario, story / SCENARIO)
    lines = [f"{each.check}: {each.detail}" for each in complaints]
    (story / "complaints.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    commands = [
        "# Again, with all kills:  ./scripts/explore.sh --story THIS_FOLDER",
        "# By hand, without kills from outside; the text is prepared anew by the explorer:",
        *scenario.commands(text, Path("run")),
    ]
    (story / "commands.sh").write_text("\n".join(commands) + "\n", encoding="utf-8")
    for launch in sorted(ran_in.glob("launch*")):
        shutil.copytree(launch, story / launch.name)


def write_scenario(scenario: Scenario, path: Path) -> None:
    """Writes a scenario to a file."""
    path.write_text(json.dumps(dump_scenario(scenario), indent=1) + "\n", encoding="utf-8")


def read_story(path: Path) -> Scenario:
    """Returns the scenario of a story.

    Args:
        path: its folder, or its file.

    Raises:
        UserError: there is none.
    """
    file = path / SCENARIO if path.is_dir() else path
    try:
        return load_scenario(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is no scenario of the explorer: {error}") from error
