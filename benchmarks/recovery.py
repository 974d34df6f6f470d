# SPDX-License-Identifier: Apache-2.0
"""How long a recovery takes: processes of a running job are killed from outside, at random times.

    .venv/bin/python benchmarks/recovery.py                 # fast timeouts, 10 kills in 5 jobs
    .venv/bin/python benchmarks/recovery.py --timeouts default --jobs 1

A recovery is timed by one clock from the SIGKILL to the first new committed step of all ranks. What
it `costs` is that time less the replay itself and less one iteration. The parts are those of the
rank that shares the lost stage: detect (kill to the interrupt), teardown, rendezvous, enter (model
of the newcomer, threads, connections), plan, fetch, open (data sets, up to the first replayed
step), replay, reprotect, wait, first step. Parts and total are of the same recoveries, but medians
don't add up. Each job has as many spares as kills, and a killed process's memory is lost with it.

    .venv/bin/python benchmarks/recovery.py --compare                     # compute is timed waits
    .venv/bin/python benchmarks/recovery.py --compare --stage-s 0         # and real

compares how a step is replayed by the lost stage alone, from its neighbours' logs, and by all
stages, without logs: for S stages of one rank each and M micro-batches, the prediction of section
3.4 of the paper is M t_s and (M + S - 1) t_s, with t_s the time of a stage per micro-batch. The
middle stage is killed in the middle of the same step of both jobs.

Flags of pretrain_moe.py are added to the defaults and win over them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

from megatron_moevement.runtime.observation.events import EventName, EventRecord, event_of_line

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where tests.harness is

from tests.harness.random_text import data_flags, prepare_random_text

RANKS, STAGES, WINDOW = 4, 2, 3
FAST = (
    "--inprocess-monitor-thread-interval=0.05",
    "--inprocess-monitor-process-interval=0.05",
    "--inprocess-progress-watchdog-interval=0.05",
    "--inprocess-heartbeat-interval=0.5",
    "--inprocess-heartbeat-timeout=10",
    "--inprocess-soft-timeout=20",
    "--inprocess-hard-timeout=25",
    "--inprocess-barrier-timeout=40",
    "--inprocess-completion-timeout=40",
    "--inprocess-last-call-wait=0",
    "--inprocess-termination-grace-time=0.05",
)
TINY = (
    "--model-preset=tiny",
    "--untie-embeddings-and-output-weights",
    "--train-iters=2000",
    "--lr=1e-4",
    "--eval-iters=0",
    "--num-workers=1",
    "--bf16",
    "--use-distributed-optimizer",
    "--log-interval=1",
    "--moevement-no-progress-bar",
    "--moevement-strategy=moevement",
    f"--moevement-window={WINDOW}",
    "--moevement-replicas=2",
    "--inprocess-restart",
    "--moevement-no-adoption",
)
LAYOUT = (
    f"--pipeline-model-parallel-size={STAGES}",
    "--expert-model-parallel-size=2",
    "--micro-batch-size=2",
    "--global-batch-size=16",
)
MICRO_BATCHES = 8
SMALL = ("--hidden-size=32", "--ffn-hidden-size=64", "--moe-ffn-hidden-size=32", "--seq-length=16")
COMPARED_STAGES = (2, 3, 4)
STRUCK_STEP = 3 * WINDOW
PARTS = (
    "detect",
    "teardown",
    "rendezvous",
    "enter",
    "plan",
    "fetch",
    "open",
    "replay",
    "reprotect",
    "wait",
    "first step",
)
POLL_S = 0.2
PATIENCE_S = 240.0


@dataclasses.dataclass(frozen=True)
class Program:
    """What is started."""

    flags: tuple[str, ...]
    ranks: int
    spares: int
    path: str = "pretrain_moe.py"


class Job:
    """A running job, as its events tell of it."""

    def __init__(self, folder: Path, program: Program) -> None:
        self.folder = folder
        self._ranks = program.ranks
        self._events: list[EventRecord] = []
        self._read_bytes: dict[Path, int] = {}
        self._log = (folder / "log").open("wb")
        launcher = [sys.executable, "-m", "megatron_moevement.cli.launch"]
        counts = ["-n", str(program.ranks), "-s", str(program.spares)]
        places = [
            f"--moevement-event-dir={folder}/events",
            f"--moevement-store-dir={folder}/store",
            f"--data-cache-path={folder}/index",
        ]
        self._process = subprocess.Popen(
            [*launcher, *counts, "--program", program.path, "--", *program.flags, *places],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def events(self, name: EventName, generation: int) -> list[EventRecord]:
        """Returns what all processes have recorded of a kind, in the order of time."""
        for path in (self.folder / "events").glob("*.jsonl"):
            self._events += self._news_of(path)
        self._events.sort(key=lambda event: event.time)
        return [
            event for event in self._events if (event.event, event.generation) == (name, generation)
        ]

    def _news_of(self, path: Path) -> Iterator[EventRecord]:
        """Yields what was recorded since the last look: all again and again would take a core."""
        with path.open("rb") as file:
            file.seek(self._read_bytes.get(path, 0))
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read_bytes[path] = self._read_bytes.get(path, 0) + len(line)
                event = event_of_line(line)
                if event is not None:
                    yield event

    @property
    def pid(self) -> int:
        """Of the launcher."""
        return self._process.pid

    def await_steps(
        self, generation: int, count: int, meanwhile: Callable[[], None] = lambda: None
    ) -> list[EventRecord]:
        """Waits until every rank has committed some steps of a generation; returns the events.

        Args:
            meanwhile: called again and again.
        """
        deadline = time.monotonic() + PATIENCE_S
        while True:
            steps = self.events(EventName.ITERATION, generation)
            ranks = [sum(one.logical_rank == rank for one in steps) for rank in range(self._ranks)]
            if min(ranks) >= count:
                return steps
            if self._process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the job came to no end:\n{(self.folder / 'log').read_text()[-4000:]}")
            time.sleep(POLL_S)
            meanwhile()

    def kill(self, pid: int) -> float:
        """Kills a process, and takes what it kept in memory; returns when."""
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        process = next(one[5:].decode() for one in environment if one.startswith(b"RANK="))
        killed_s = time.time()
        os.kill(pid, signal.SIGKILL)
        for folder in self.folder.glob(f"store/*/process-{process}"):
            shutil.rmtree(folder, ignore_errors=True)
        return killed_s

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


@contextlib.contextmanager
def running(program: Program) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="moevement_recovery_", dir="/dev/shm") as name:
        folder = Path(name)
        (folder / "text").mkdir()
        text = prepare_random_text(folder / "text")
        flags = (*program.flags, *data_flags(text))
        with contextlib.closing(Job(folder, dataclasses.replace(program, flags=flags))) as job:
            yield job


def recovery(job: Job, generation: int, random: Random) -> dict[str, float]:
    """Kills the process of a random rank; returns the seconds of the recovery's parts."""
    steps = job.await_steps(generation, 2 * WINDOW + 2)
    iteration_s = statistics.median(one.fields["duration_s"] for one in steps)
    time.sleep(random.uniform(0, 2 * iteration_s))
    lost = random.randrange(RANKS)
    killed_s = job.kill(next(one.pid for one in steps if one.logical_rank == lost))
    job.await_steps(generation + 1, 1)
    return durations(job, generation + 1, killed_s, lost, iteration_s)


def durations(
    job: Job, generation: int, killed_s: float, lost: int, iteration_s: float
) -> dict[str, float]:
    """Returns the parts of a recovery, its total, and what it cost."""
    per_stage = RANKS // STAGES
    peer = next(
        rank for rank in range(RANKS) if rank != lost and rank // per_stage == lost // per_stage
    )

    def of(name: EventName) -> list[EventRecord]:
        return [one for one in job.events(name, generation) if one.logical_rank == peer]

    fault, recovered = of(EventName.FAULT_DETECTED)[0].fields, of(EventName.RECOVERED)[0]
    replays = [one.time for one in of(EventName.REPLAY)]
    parts = dict(recovered.fields["breakdown_s"])
    strategy = ("plan", "fetch", "replay", "reprotect", "wait")
    opened_s = recovered.time - sum(parts[name] for name in strategy)
    entered_s = fault["noticed_s"] + fault["teardown_s"] + fault["rendezvous_s"]
    gaps = [after - before for before, after in itertools.pairwise(replays)]
    replay_s = min(parts["replay"], len(replays) * statistics.mean(gaps or [parts["replay"]]))
    firsts = [
        min(one.time for one in job.events(EventName.ITERATION, generation) if one.pid == pid)
        for pid in {one.pid for one in job.events(EventName.ITERATION, generation)}
    ]
    total_s = max(firsts) - killed_s
    parts |= {
        "detect": fault["noticed_s"] - killed_s,
        "enter": opened_s - entered_s,
        "open": parts["replay"] - replay_s,
        "replay": replay_s,
        "first step": max(firsts) - recovered.time,
    }
    iteration_s = min(iteration_s, parts["first step"])
    costs = {"total": total_s, "iteration": iteration_s}
    return parts | costs | {"costs": total_s - replay_s - iteration_s}


def table(found: Sequence[dict[str, float]]) -> str:
    lines = ["| part | median (s) | least | most |", "|---|---|---|---|"]
    for name in (*PARTS, "total", "iteration", "costs"):
        values = [one[name] for one in found]
        title = f"**{name}**" if name in {"total", "costs"} else name
        lines.append(
            f"| {title} | {statistics.median(values):.3f} | {min(values):.3f} | {max(values):.3f} |"
        )
    return "\n".join(lines) + "\n"


def replayed_step(stages: int, stage_s: float, flags: Sequence[str]) -> list[float]:
    """Loses a stage; returns how long each replayed step after the first took."""
    lost = stages // 2
    sizes = (
        f"--pipeline-model-parallel-size={stages}",
        f"--num-layers={stages if stage_s else 12}",
        "--micro-batch-size=1",
        f"--global-batch-size={MICRO_BATCHES}",
        *(SMALL if stage_s else ()),
    )
    fault = f"--moevement-faults={STRUCK_STEP}:forward@{lost}"
    flags = (*TINY, *sizes, *FAST, fault, *flags)
    program = Program(flags, stages, spares=1)
    if stage_s:
        flags = (f"--stage-s={stage_s}", *flags)
        program = Program(flags, stages, 1, str(Path(__file__).with_name("timed_pretrain.py")))
    with running(program) as job:
        job.await_steps(1, 1)
        times = [one.time for one in job.events(EventName.REPLAY, 1) if one.logical_rank == lost]
    return [after - before for before, after in itertools.pairwise(times)]


def compare(stage_s: float, flags: Sequence[str]) -> str:
    """Replays the same fault with logs and without; returns a table."""
    lines = [
        "| stages | replay | step (s) | predicted (s) | measured / predicted | steps |",
        "|---|---|---|---|---|---|",
    ]
    for stages in COMPARED_STAGES:
        for name, count, own in (
            ("localized", MICRO_BATCHES, ()),
            ("global", MICRO_BATCHES + stages - 1, ("--moevement-no-upstream-log",)),
        ):
            steps = replayed_step(stages, stage_s, (*flags, *own))
            step_s = statistics.median(steps)
            predicted = " | "  # real compute shares the cores
            if stage_s:
                predicted = f"{count * stage_s:.2f} | {step_s / (count * stage_s):.3f}"
            lines.append(f"| {stages} | {name} | {step_s:.3f} | {predicted} | {len(steps)} |")
            sys.stderr.write(lines[-1] + "\n")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=2, help="of each job")
    parser.add_argument("--jobs", type=int, default=5, help="one after the other")
    parser.add_argument("--seed", type=int, default=0, help="of who is killed when")
    parser.add_argument("--timeouts", choices=("fast", "default"), default="fast")
    parser.add_argument("--compare", action="store_true", help="localized and global replay")
    parser.add_argument("--stage-s", type=float, default=0.2, help="t_s; 0: real compute")
    options, flags = parser.parse_known_args()
    if options.compare:
        sys.stdout.write(
            f"{MICRO_BATCHES} micro-batches, a stage takes {options.stage_s} s each\n\n"
        )
        sys.stdout.write(compare(options.stage_s, flags))
        return 0
    times = FAST if options.timeouts == "fast" else ()
    random = Random(options.seed)
    found = []
    for _ in range(options.jobs):
        program = Program((*TINY, *LAYOUT, *times, *flags), RANKS, options.kills)
        with running(program) as job:
            for generation in range(options.kills):
                found.append(recovery(job, generation, random))
                sys.stderr.write(" ".join(f"{k} {v:.3f}" for k, v in found[-1].items()) + "\n")
    sys.stdout.write(f"{len(found)} kills, timeouts: {' '.join(times) or 'default'}\n\n")
    sys.stdout.write(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
