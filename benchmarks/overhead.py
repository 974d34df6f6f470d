# SPDX-License-Identifier: Apache-2.0
"""What protection costs while nothing fails: the same job with it and without it, in turns.

    .venv/bin/python benchmarks/overhead.py                 # both modes, 10 minutes
    .venv/bin/python benchmarks/overhead.py --mode overlap --window 1 --json overhead.json
    .venv/bin/python benchmarks/overhead.py --of="--moevement-order=hard"    # of flags instead

With it: windows, upstream log, two copies over TCP, in-process restart and its stores. Without it:
`--moevement-strategy=off`, no in-process restart. Both write their events. In mode `overlap` the
passes are waits that leave the cores free, as on a host with GPUs: the layers compute nothing.
Embedding, loss, reductions and optimizer are real, and so is the size of each tensor. In mode
`saturated` all compute is real.

Both jobs of a pair live at the same time. They train in turns of seconds, while all processes of
the other one are stopped, so that what else changes on a machine changes for both. The step in
which a job was stopped does not count.

A step ends when its last rank has it. CPU seconds, user and system, are of all processes of a job,
its launcher and monitors too: they are read all the time and interpolated at the ends of the steps.
A round is a turn of each job. Each figure is the median over rounds. In brackets: 95 % bootstrap
interval, of rounds and of the steps in them. The bare loop copies as many bytes into a ring, hashes
them, and sends them to two servers that keep them, with production's parts in a process that does
nothing else.

Flags of pretrain_moe.py are added to the defaults and win over them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import psutil
from bare_loop import PEERS, bare_loop
from recovery import RANKS, STAGES, Job, Program, running
from transfers import MIB

from megatron_moevement.runtime.observation.events import EventName, EventRecord
from megatron_moevement.settings.fault_tolerance import OFF

REFERENCE = (
    "--model-preset=tiny",  # what the sizes below leave open
    "--num-layers=8",
    "--hidden-size=256",
    "--num-attention-heads=8",
    "--num-experts=8",
    "--moe-router-topk=2",
    "--moe-ffn-hidden-size=512",
    "--seq-length=256",
    "--micro-batch-size=2",
    "--global-batch-size=16",
    "--bf16",
    f"--pipeline-model-parallel-size={STAGES}",
    "--expert-model-parallel-size=2",
    "--train-iters=100000",
    "--lr=1e-4",
    "--eval-iters=0",
    "--log-interval=1",
    "--moevement-no-progress-bar",
)
MICRO_BATCHES = 4
"""Of a step on each rank."""
UNPROTECTED = (f"--moevement-strategy={OFF}",)
PROTECTED = (
    "--moevement-strategy=moevement",
    f"--moevement-replicas={PEERS}",
    "--inprocess-restart",
)
PATIENT = (
    "--inprocess-heartbeat-timeout=300",
    "--inprocess-soft-timeout=300",
    "--inprocess-hard-timeout=400",
    "--inprocess-barrier-timeout=500",
    "--inprocess-completion-timeout=500",
)
"""A job is stopped while another one starts; it would be restarted after a minute."""
OVERLAP, SATURATED = "overlap", "saturated"
BARE_BYTES = 512 * MIB
DRAWS = 2000

Series: TypeAlias = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Steps:
    """Consecutive steps of one job; bytes and CPU seconds of all its ranks together."""

    duration_s: Series
    cpu_s: Series
    stall_s: Series
    """Mean of the ranks."""
    captured_bytes: Series
    replicated_bytes: Series
    log_bytes: Series
    machine_busy: float
    """Share of all cores that anything kept busy meanwhile."""

    def drawn(self, random: np.random.Generator) -> Steps:
        """Returns as many steps, drawn with replacement."""
        drawn = random.integers(len(self.duration_s), size=len(self.duration_s))
        return Steps(
            self.duration_s[drawn],
            self.cpu_s[drawn],
            self.stall_s[drawn],
            self.captured_bytes[drawn],
            self.replicated_bytes[drawn],
            self.log_bytes[drawn],
            self.machine_busy,
        )

    @property
    def busy(self) -> float:
        """Share of all cores that the job kept busy."""
        return float(self.cpu_s.sum() / self.duration_s.sum() / (psutil.cpu_count() or 1))


@dataclasses.dataclass(frozen=True)
class Round:
    """A turn of a job without protection and one of a job with it."""

    off: Steps
    on: Steps

    def drawn(self, random: np.random.Generator) -> Round:
        return Round(self.off.drawn(random), self.on.drawn(random))


FIGURES: dict[str, Callable[[Round], float]] = {
    "step without (s)": lambda one: float(np.median(one.off.duration_s)),
    "step with (s)": lambda one: float(np.median(one.on.duration_s)),
    "ratio of steps": lambda one: float(
        np.median(one.on.duration_s) / np.median(one.off.duration_s)
    ),
    "CPU of a step without (s)": lambda one: one.off.cpu_s.mean(),
    "CPU of a step with (s)": lambda one: one.on.cpu_s.mean(),
    "ratio of CPU": lambda one: one.on.cpu_s.mean() / one.off.cpu_s.mean(),
    "cores busy by the job without (%)": lambda one: 100 * one.off.busy,
    "cores busy by the job with (%)": lambda one: 100 * one.on.busy,
    "cores busy by all without (%)": lambda one: 100 * one.off.machine_busy,
    "cores busy by all with (%)": lambda one: 100 * one.on.machine_busy,
    "stall of a step (ms)": lambda one: 1e3 * one.on.stall_s.mean(),
    "captured in a step (MB)": lambda one: one.on.captured_bytes.mean() / 1e6,
    "copied to peers in a step (MB)": lambda one: one.on.replicated_bytes.mean() / 1e6,
    "logged in a step (MB)": lambda one: one.on.log_bytes.mean() / 1e6,
    "CPU of protection (ns per captured byte)": lambda one: (
        1e9 * (one.on.cpu_s.mean() - one.off.cpu_s.mean()) / one.on.captured_bytes.mean()
    ),
}
PER_BYTE = "CPU of protection (ns per captured byte)"


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"

    def over(self, divisor: float) -> Estimate:
        return Estimate(self.value / divisor, self.low / divisor, self.high / divisor)


def estimates(rounds: Sequence[Round], draws: int = DRAWS) -> dict[str, Estimate]:
    """Returns each figure: its median over rounds, and the interval of that."""
    random = np.random.default_rng(0)
    resampled = []
    for _ in range(draws):
        chosen = random.integers(len(rounds), size=len(rounds))
        drawn = [rounds[number].drawn(random) for number in chosen]
        resampled.append([np.median([of(one) for one in drawn]) for of in FIGURES.values()])
    ends = np.quantile(resampled, (0.025, 0.975), axis=0).T
    return {
        name: Estimate(float(np.median([of(one) for one in rounds])), float(low), float(high))
        for (name, of), (low, high) in zip(FIGURES.items(), ends, strict=True)
    }


def _processes_of(job: Job) -> list[psutil.Process]:
    root = psutil.Process(job.pid)
    return [root, *root.children(recursive=True)]


class Clocks:
    """CPU seconds of a job's processes, of the machine and of the wall, whenever they are read."""

    def __init__(self, job: Job) -> None:
        self._processes = _processes_of(job)
        self._read: list[tuple[float, float, float, float]] = []
        self.read()

    def read(self) -> None:
        cpu_s = sum(sum(each.cpu_times()[:4]) for each in self._processes)
        machine = psutil.cpu_times()
        idle_s = machine.idle + machine.iowait
        # What guests take is in the user's share already.
        all_s = sum(machine) - machine.guest - machine.guest_nice
        self._read.append((time.time(), cpu_s, all_s - idle_s, all_s))

    def at(self, times: Sequence[float]) -> tuple[Series, float]:
        """Returns CPU seconds at these times, and how busy the machine was between them."""
        read_at, cpu_s, busy_s, all_s = np.array(self._read).T
        busy, passed = (np.interp((times[0], times[-1]), read_at, each) for each in (busy_s, all_s))
        return np.interp(times, read_at, cpu_s), float(np.ptp(busy) / np.ptp(passed))


class Turns:
    """A job that trains while it has its turn, and else is stopped, all its processes at once."""

    def __init__(self, job: Job) -> None:
        """Stops it."""
        self._job = job
        self.stop()

    def stop(self) -> None:
        """Stops it; the launcher first, which would take note of what the others do."""
        self._processes = _processes_of(self._job)
        for each in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.suspend()

    def resume(self) -> None:
        for each in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.resume()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        self.resume()
        try:
            yield
        finally:
            self.stop()


def measure(job: Job, count: int) -> Steps:
    """Measures steps of a job after the one that it is in."""
    clocks = Clocks(job)
    first = 1 + max(one.iteration for one in job.events(EventName.ITERATION, 0))
    events = job.await_steps(0, first + count, clocks.read)
    clocks.read()
    steps = [[one for one in events if one.iteration == first + n] for n in range(count + 1)]
    ends = [max(one.time for one in step) for step in steps]
    cpu_s, machine_busy = clocks.at(ends)

    def total(name: str) -> Series:
        return np.array([_total(step, name) for step in steps[1:]])

    return Steps(
        duration_s=np.diff(ends),
        cpu_s=np.diff(cpu_s),
        stall_s=total("stall_s") / RANKS,
        captured_bytes=total("captured_bytes"),
        replicated_bytes=total("replicated_bytes"),
        log_bytes=total("log_bytes"),
        machine_busy=machine_busy,
    )


def _total(step: Sequence[EventRecord], name: str) -> float:
    return float(sum(one.fields[name] for one in step))


def program(mode: str, options: argparse.Namespace, flags: Sequence[str]) -> Program:
    """Returns a job, protected or not by its flags."""
    if mode == SATURATED:
        return Program((*REFERENCE, *flags), RANKS, 0)
    stage_s = options.iteration_s / (MICRO_BATCHES + STAGES - 1)
    path = str(Path(__file__).with_name("timed_pretrain.py"))
    return Program((f"--stage-s={stage_s}", "--idle-layers", *REFERENCE, *flags), RANKS, 0, path)


def measured_rounds(
    mode: str, options: argparse.Namespace, flags: Sequence[str], ends_s: float
) -> Iterator[Round]:
    """Yields rounds of pairs of jobs, as long as another pair is likely to end in time."""
    began_s, pairs = time.monotonic(), 0
    protected = (*PROTECTED, *PATIENT, f"--moevement-window={options.window}")
    off = protected if options.of else UNPROTECTED
    sides = {"off": (*off, *flags), "on": (*protected, *options.of, *flags)}
    while not pairs or time.monotonic() + (time.monotonic() - began_s) / pairs < ends_s:
        programs = {side: program(mode, options, sides[side]) for side in sides}
        yield from _rounds_of_a_pair(programs, options)
        pairs += 1


def _rounds_of_a_pair(programs: dict[str, Program], options: argparse.Namespace) -> Iterator[Round]:
    """Starts two jobs, of which one trains while the other one is stopped."""
    jobs: dict[str, Job] = {}
    with contextlib.ExitStack() as stack:
        turns = {}
        for side, each in programs.items():
            jobs[side] = stack.enter_context(running(each))
            jobs[side].await_steps(0, options.dropped)
            turns[side] = Turns(jobs[side])
            stack.callback(turns[side].resume)  # else it can't end
        for number in range(options.turns):
            found = {}
            for side in ("off", "on") if number % 2 == 0 else ("on", "off"):
                with turns[side].turn():
                    found[side] = measure(jobs[side], options.steps)
                sys.stderr.write(
                    f"{number + 1}, {side}: step {np.median(found[side].duration_s):.3f} s, "
                    f"CPU {found[side].cpu_s.mean():.3f} s a step\n"
                )
            yield Round(**found)


@dataclasses.dataclass(frozen=True)
class Result:
    """What was found in one mode.

    Attributes:
        bare_s: CPU seconds per byte of the bare loop.
    """

    rounds: list[Round]
    bare_s: float

    def figures(self) -> dict[str, Estimate]:
        """Returns each figure by its title."""
        found = estimates(self.rounds)
        bare = {"protection / bare loop": found[PER_BYTE].over(1e9 * self.bare_s)}
        return found | bare

    def document(self) -> dict[str, Any]:
        """Returns all that was measured."""
        figures = {name: dataclasses.asdict(each) for name, each in self.figures().items()}
        rounds = [dataclasses.asdict(one) for one in self.rounds]
        return {"figures": figures, "bare_s_per_byte": self.bare_s, "rounds": rounds}


def table(results: dict[str, Result]) -> str:
    """Returns the figures, a column for each mode."""
    lines = [f"| | {' | '.join(results)} |", "|---" * (1 + len(results)) + "|"]
    columns = [each.figures() for each in results.values()]
    lines += [
        f"| {name} | {' | '.join(str(column[name]) for column in columns)} |" for name in columns[0]
    ]
    bare = " | ".join(f"{1e9 * each.bare_s:.3f}" for each in results.values())
    lines.append(f"| bare loop (ns per byte) | {bare} |")
    rounds = " | ".join(
        f"{len(one.rounds)} x {len(one.rounds[0].on.cpu_s)}" for one in results.values()
    )
    lines.append(f"| rounds x steps | {rounds} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--mode", choices=(OVERLAP, SATURATED, "both"), default="both")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="no pair of jobs begins that ends later"
    )
    parser.add_argument("--turns", type=int, default=8, help="of each job of a pair")
    parser.add_argument("--steps", type=int, default=4, help="of a turn")
    parser.add_argument("--dropped", type=int, default=20, help="first steps of a job")
    parser.add_argument("--window", type=int, default=4, help="W")
    parser.add_argument(
        "--of", type=shlex.split, default=[], help="flags: both jobs are protected, one has them"
    )
    parser.add_argument("--iteration-s", type=float, default=1.0, help="waits of a step (overlap)")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    options, flags = parser.parse_known_args(argv)
    modes = (OVERLAP, SATURATED) if options.mode == "both" else (options.mode,)
    results = {}
    began_s = time.monotonic()
    for number, mode in enumerate(modes, 1):
        ends_s = began_s + 60 * options.minutes * number / len(modes)
        rounds = list(measured_rounds(mode, options, flags, ends_s))
        captured = sum(one.on.captured_bytes.mean() for one in rounds) / len(rounds) / RANKS
        size_bytes = max(1, int(captured))
        results[mode] = Result(rounds, bare_loop(size_bytes, max(1, BARE_BYTES // size_bytes)))
    sys.stdout.write(table(results))
    if options.json is not None:
        document = {mode: each.document() for mode, each in results.items()}
        options.json.write_text(json.dumps(document, default=np.ndarray.tolist, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
