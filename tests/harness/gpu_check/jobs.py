# SPDX-License-Identifier: Apache-2.0
"""Whole jobs that lose a process and go on: they end with the bits of a job that loses none."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_moevement.runtime.observation.events import EventName, EventRecord, read_events
from tests.harness.combinations import ALWAYS
from tests.harness.gpu_check.results import Found, Scale
from tests.harness.nccl_like.abort import FOLDER_VARIABLE
from tests.harness.random_text import data_flags, prepare_random_text

ROOT = Path(__file__).resolve().parents[3]
SHARING = Path(__file__).with_name("sharing_pretrain.py")
DETERMINISTIC = {
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""Variables that equal bits need on a GPU, beside `--deterministic-mode`."""
_WINDOW, STEPS, FAULT = 3, 18, 12
_MODEL = {
    Scale.SMALL: (),
    Scale.FULL: (
        "--num-layers=4",
        "--hidden-size=512",
        "--ffn-hidden-size=1024",
        "--moe-ffn-hidden-size=512",
        "--num-experts=8",
        "--seq-length=128",
    ),
}
PROTECTED = (
    "--moevement-strategy=moevement",
    f"--moevement-window={_WINDOW}",
    "--moevement-no-replica-copy",
)
_STAGES = ("--pipeline-model-parallel-size=2", "--untie-embeddings-and-output-weights")
_TOLD_CHARACTERS = 1500


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        told: the last of what its processes said.
    """

    code: int
    told: str
    digest: Mapping[str, Any] | None
    events: Sequence[EventRecord]

    @property
    def failures(self) -> list[str]:
        """What it failed with, if it did."""
        return [] if self.code == 0 else [f"a job ended with {self.code}: {self.told}"]


@dataclasses.dataclass(frozen=True)
class Jobs:
    """Starts jobs of one model, one after the other.

    Attributes:
        folder: of what they write.
        flags: of each.
        ranks: that train.
        program: what each rank runs; None: `pretrain_moe.py`.
    """

    folder: Path
    flags: tuple[str, ...]
    ranks: int = 1
    program: Path | None = None

    def run(
        self, name: str, *flags: str, spares: int = 0, env: Mapping[str, str] | None = None
    ) -> Ended:
        """Runs a job to its end.

        Args:
            name: of its digest and its events; launches of one name go on with each other.
            env: variables of its own.
        """
        own = self.folder / name
        (own / "communicators").mkdir(parents=True, exist_ok=True)
        digest = own / "digest.json"
        command = [sys.executable, "-m", "megatron_moevement.cli.launch"]
        command += ["-n", str(self.ranks), "-s", str(spares)]
        command += [] if self.program is None else ["--program", str(self.program)]
        command += ["--", *self.flags, f"--moevement-event-dir={own / 'events'}"]
        command += [f"--moevement-state-digest={digest}", *flags]
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        variables[FOLDER_VARIABLE] = str(own / "communicators")
        if "--deterministic-mode" in self.flags:
            variables |= DETERMINISTIC
        result = subprocess.run(
            command,
            cwd=ROOT,
            env={**variables, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        ended = json.loads(digest.read_text(encoding="utf-8")) if digest.exists() else None
        events = read_events(own / "events") if (own / "events").exists() else []
        return Ended(result.returncode, result.stdout[-_TOLD_CHARACTERS:], ended, events)


def relaunch(scale: Scale, folder: Path) -> Found:
    """Kills a job of one rank, launches it again, and compares it with one that is not killed."""
    jobs = Jobs(folder, flags_of(scale, folder))
    with tempfile.TemporaryDirectory(prefix="store-", dir=folder) as store:
        protected = (*PROTECTED, "--moevement-replicas=0", f"--moevement-store-dir={store}")
        plain = jobs.run("plain")
        faults = ("--moevement-run-id=relaunch", "--moevement-faults", f"{FAULT}:barrier")
        killed, again = (jobs.run("killed", *protected, *faults) for _ in range(2))
    problems = [] if killed.code else ["no fault struck"]
    return judged(plain, again, "GLOBAL", problems)


def restart_stages(scale: Scale, folder: Path) -> Found:
    """Kills a stage of two; a spare takes its place, and the stage replays alone."""
    return _restart(scale, folder, _STAGES, "LOCALIZED")


def restart_nccl(scale: Scale, folder: Path) -> Found:
    """Does the same with a GPU for each process, over NCCL."""
    return _restart(scale, folder, _STAGES, "LOCALIZED", program=None)


def restart_experts(scale: Scale, folder: Path) -> Found:
    """Kills one of two expert-parallel ranks; a spare takes its place, and both replay."""
    return _restart(scale, folder, ("--expert-model-parallel-size=2",), "GLOBAL")


def _restart(
    scale: Scale,
    folder: Path,
    layout: Sequence[str],
    verdict: str,
    program: Path | None = SHARING,
) -> Found:
    jobs = Jobs(folder, (*flags_of(scale, folder), *layout), ranks=2, program=program)
    with tempfile.TemporaryDirectory(prefix="store-", dir=folder) as store:
        plain = jobs.run("plain")
        faults = ("--inprocess-restart", "--moevement-faults", f"{FAULT}:backward@1")
        flags = (*PROTECTED, "--moevement-replicas=1", f"--moevement-store-dir={store}", *faults)
        restarted = jobs.run("restarted", *flags, spares=1)
    return judged(plain, restarted, verdict, [])


def judged(plain: Ended, recovered: Ended, verdict: str, problems: Sequence[str]) -> Found:
    """Returns whether a job recovered by a replay, and ended as one that lost nothing."""
    found = [*problems, *plain.failures, *recovered.failures]
    if plain.digest is None or recovered.digest != plain.digest:
        found.append("the digests differ, or there is none")
    plans = fields_of(recovered, EventName.PLAN)
    verdicts = sorted({plan["verdict"] for plan in plans})
    if verdicts != [verdict]:
        found.append(f"the verdict is to be {verdict}, and is {verdicts}")
    replays = [event for event in recovered.events if event.event is EventName.REPLAY]
    steps = {event.iteration for event in replays}
    if len(steps) < _WINDOW - 1:
        found.append(f"only steps {sorted(steps)} were replayed")
    if not all(event.fields["replay_verified"] for event in replays):
        found.append("a replay was not what the first computation was")
    recoveries = fields_of(recovered, EventName.RECOVERED)
    figures = {
        "verdict": ", ".join(verdicts),
        "steps replayed": len(steps),
        "with frozen operators": len(
            {event.iteration for event in replays if event.fields["frozen"]}
        ),
        "guarantee": ", ".join(sorted({str(each["guarantee"]) for each in recoveries})),
    }
    return Found(figures, found)


def fields_of(ended: Ended, name: EventName) -> list[Mapping[str, Any]]:
    """Returns what the events of a name have."""
    return [event.fields for event in ended.events if event.event is name]


def flags_of(scale: Scale, folder: Path) -> tuple[str, ...]:
    """Returns the flags of every job of a part; its data go into the folder."""
    text = folder / "text"
    text.mkdir()
    return (
        *ALWAYS,
        *_MODEL[scale],
        *data_flags(prepare_random_text(text)),
        "--bf16",
        "--moe-grouped-gemm",
        "--hidden-dropout=0.1",
        "--attention-dropout=0.1",
        f"--train-iters={STEPS}",
        "--deterministic-mode",
        "--moevement-no-progress-bar",
    )
