# SPDX-License-Identifier: Apache-2.0
"""A job of `scripts/train_moe.sbatch` on a real Slurm of virtual nodes, struck and judged.

    scripts/slurm_local.sh .venv/bin/python -m tests.harness.slurm_job CASE SEED FOLDER STEPS

Each case has a Slurm of its own, so that none finds what another left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_moevement.runtime.observation.events import EventName, EventRecord, read_events

ROOT = Path(__file__).resolve().parents[2]
LONG, SHORT = 120, 40
"""Steps of a job: of most, and of one that has time enough when it loses a process."""
NODES, TASKS_PER_NODE, SPARES = 3, 2, 2
GRACE_S = 30
"""That a preempted job gets for its save."""
HELD_S = 8.0
"""For which a rank is held up in its save: more than Slurm's KillWait, less than the grace."""
WINDOW = 3
COPIED_STEPS = 3 * WINDOW
"""Steps after a recovery in which each slot is copied again: three windows."""
WORDS = 300
PATIENCE_S = 400.0
POLL_S = 0.2
END_POLL_S = 1.0
"""Nothing is struck by when the end of a job is seen, and each look starts a process."""
MODEL = (
    "--model-preset=tiny --num-layers=4 --hidden-size=64 --num-attention-heads=4 --num-experts=4"
    " --moe-ffn-hidden-size=32 --moe-router-topk=2 --seq-length=64 --max-position-embeddings=64"
    " --pipeline-model-parallel-size=2 --expert-model-parallel-size=2"
    " --micro-batch-size=2 --global-batch-size=8"
    " --lr-warmup-fraction=0 --eval-iters=0 --log-interval=1 --save-interval=100000"
    f" --moevement-window={WINDOW} --moevement-no-progress-bar"
).split()


class Case(Enum):
    """What happens to a job."""

    NOTHING = "nothing"
    PROCESS = "process"
    NODE = "node"
    FIRST_NODE = "first-node"
    TIME_LIMIT = "time-limit"
    PREEMPTION = "preemption"
    GRACE = "grace"
    NO_SPARES = "no-spares"

    @property
    def steps(self) -> int:
        """The steps of a job that is struck."""
        return SHORT if self is Case.PROCESS else LONG


QUEUED_AGAIN = frozenset({Case.FIRST_NODE, Case.PREEMPTION, Case.GRACE})


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job stands, by Slurm."""

    state: str
    restarts: int
    nodes: str


class SlurmJob:
    """One job; made in the namespace of `scripts/slurm_local.sh`."""

    def __init__(self, folder: Path, steps: int) -> None:
        """Takes a folder in which the job runs, and the steps that it trains."""
        self.folder, self.steps = folder, steps
        self.events = folder / "run" / "events"
        self.digest = folder / "digest.json"
        self._data, self._tokenizer = folder / "text", folder / "tokenizer.json"
        _prepare_words(self._data, self._tokenizer)
        self._ids: list[str] = []

    def submit(
        self, *, options: Sequence[str] = (), nodes: int = NODES, spares: int = SPARES
    ) -> None:
        """Submits it, or what goes on with it."""
        environment = os.environ | {
            "RUN_DIR": str(self.folder / "run"),
            "REPOSITORY": str(ROOT),
            "DATA_PATH": str(self._data),
            "TOKENIZER_MODEL": str(self._tokenizer),
            "SPARES": str(spares),
            "SRUN_FLAGS": "--cpu-bind=none",
            "OMP_NUM_THREADS": "1",
        }
        command = ["sbatch", "--parsable", f"--nodes={nodes}", f"--output={self.folder}/log"]
        command += [f"--ntasks-per-node={TASKS_PER_NODE}", "--gpus-per-node=0", *options]
        command += [str(ROOT / "scripts" / "train_moe.sbatch"), *MODEL]
        command += [f"--train-iters={self.steps}", "--moevement-state-digest", str(self.digest)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        self._ids.append(done.stdout.strip())

    def outcome(self) -> Outcome:
        """Returns how the one submitted last stands."""
        shown = _slurm("scontrol", "show", "job", "-o", self._ids[-1])
        fields = dict(part.partition("=")[::2] for part in shown.split())
        return Outcome(fields["JobState"], int(fields["Restarts"]), fields.get("NodeList", ""))

    def committed(self) -> int:
        """Returns the newest step that a rank has recorded."""
        with contextlib.suppress(FileNotFoundError):
            return max((event.iteration for event in self._of(EventName.ITERATION)), default=0)
        return 0

    def recoveries(self) -> int:
        """Returns how many recoveries a rank has recorded the end of."""
        return sum(event.logical_rank == 0 for event in self._of(EventName.RECOVERED))

    def saved(self) -> list[int]:
        """Returns the steps before the last one of which there are checkpoints, in order."""
        steps = {event.iteration for event in self._of(EventName.CHECKPOINT_SAVED)}
        return sorted(steps - {self.steps})

    def lost_steps(self) -> list[int]:
        """Returns how many committed steps each recovery gave up."""
        return [event.fields["lost_steps"] for event in self._of(EventName.PLAN)]

    def _of(self, name: EventName) -> Iterator[EventRecord]:
        return (event for event in read_events(self.events) if event.event is name)

    def await_step(self, step: int) -> None:
        """Waits until a rank has recorded a step."""
        self._await(lambda: self.committed() >= step, f"step {step}")

    def await_recovery(self, number: int) -> None:
        """Waits until so many recoveries have ended and what they restored is copied again."""
        self._await(lambda: self.recoveries() >= number, f"recovery {number}")
        self.await_step(self.committed() + COPIED_STEPS)

    def await_end(self) -> Outcome:
        """Waits until Slurm counts the job as ended."""
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        self._await(lambda: self.outcome().state in ended, "the end", END_POLL_S)
        return self.outcome()

    def _await(self, holds: Callable[[], bool], what: str, poll_s: float = POLL_S) -> None:
        ends_s = time.monotonic() + PATIENCE_S
        while not holds():
            if time.monotonic() > ends_s:
                log = (self.folder / "log").read_text()[-6000:]
                raise SystemExit(f"{what} never came: {self.outcome()}\n{log}")
            time.sleep(poll_s)


def _prepare_words(prefix: Path, tokenizer_file: Path) -> None:
    """Makes a tokenizer of some words, and data of them."""
    words = ["<|endoftext|>", *(f"word{number}" for number in range(1, WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tokenizer_file))
    draw = random.Random(0)  # noqa: S311  (reproducible, not secret)
    lines = (json.dumps({"text": " ".join(draw.choices(words[1:], k=100))}) for _ in range(200))
    text = prefix.with_suffix(".jsonl")
    text.write_text("\n".join(lines))
    command = [sys.executable, "-m", "megatron_moevement.cli", "data", "prepare"]
    command += ["--input", str(text), "--output-prefix", str(prefix)]
    command += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model"]
    subprocess.run([*command, str(tokenizer_file)], check=True)


def _slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _processes() -> Iterator[tuple[int, dict[str, str]]]:
    """Yields the processes of jobs, with their environments."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            lines = (folder / "environ").read_bytes().decode().split("\0")
            variables = dict(line.partition("=")[::2] for line in lines)
            if "SLURM_JOB_ID" in variables:
                yield int(folder.name), variables


def report(line: str) -> None:
    """Prints what the one who watches wants to read at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _process_of(rank: int) -> int:
    """Returns the process of a rank, not its shell and not its monitors."""
    own = [
        pid
        for pid, variables in _processes()
        if variables.get("RANK") == str(rank)
        and b"pretrain_moe.py\0" in Path("/proc", str(pid), "cmdline").read_bytes()
    ]
    return min(own)  # its monitors are forked from it


def kill_rank(rank: int) -> None:
    """Kills the process of a rank, and leaves its shell and its monitors."""
    os.kill(_process_of(rank), signal.SIGKILL)


def hold_rank(rank: int, duration_s: float) -> None:
    """Stops the process of a rank for a while, against Slurm, which continues it."""
    process, ends_s = _process_of(rank), time.monotonic() + duration_s
    while time.monotonic() < ends_s:
        os.kill(process, signal.SIGSTOP)
        time.sleep(POLL_S / 10)
    os.kill(process, signal.SIGCONT)


def _parent(pid: int, name: str) -> int | None:
    """Returns the parent of a process, if it is a program of that name."""
    with contextlib.suppress(OSError):
        parent = int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])
        if Path("/proc", str(parent), "comm").read_text().strip() == name:
            return parent
    return None


def fail_node(node: str, store: Path) -> None:
    """Ends a node: its daemon, all that runs on it, and what that kept in memory."""
    os.kill(int(Path(os.environ["SLURM_LOCAL"], f"{node}.pid").read_text()), signal.SIGKILL)
    lost = {pid: one for pid, one in _processes() if one.get("SLURMD_NODENAME") == node}
    daemons = {parent for pid in lost if (parent := _parent(pid, "slurmstepd")) is not None}
    for pid in (*daemons, *lost):  # a daemon that lives on would report how its task ended
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for rank in {one["RANK"] for one in lost.values() if "RANK" in one}:
        for folder in store.glob(f"*/process-{rank}"):
            subprocess.run(["rm", "-rf", folder], check=True)


def strike(case: Case, job: SlurmJob, draw: random.Random) -> None:
    """Submits a job and lets happen to it what its case is, at a random time."""
    store = Path("/dev/shm", f"moevement-{os.getuid()}")  # noqa: S108
    if case is Case.TIME_LIMIT:
        job.submit(options=("--time=1", "--signal=TERM@25"))
        first = job.await_end()
        report(f"at its time limit: {first}, after step {job.committed()} of {job.steps}")
        job.submit()
        return
    if case is Case.NOTHING:  # the bits do not depend on who stands by
        job.submit(nodes=NODES - SPARES // TASKS_PER_NODE, spares=0)
        return
    job.submit()
    job.await_step(draw.randrange(5, job.steps // 2))
    time.sleep(draw.uniform(0, 0.5))
    report(f"{case.value}: struck after step {job.committed()}: {job.outcome()}")
    if case is Case.PROCESS:
        kill_rank(draw.randrange(NODES * TASKS_PER_NODE - SPARES))
    elif case is Case.NODE:
        fail_node(f"n{draw.randrange(2, NODES + 1)}", store)
    elif case is Case.FIRST_NODE:
        fail_node("n1", store)
    elif case is Case.NO_SPARES:
        use_up_spares(job, draw)
        fail_node(f"n{draw.randrange(2, NODES + 1)}", store)
    elif case is Case.GRACE:
        preempt()
        hold_rank(draw.randrange(NODES * TASKS_PER_NODE - SPARES), HELD_S)
    else:
        preempt()


def preempt() -> None:
    """Submits a short job of all nodes that goes first."""
    options = ("--partition=urgent", f"--nodes={NODES + 1}", "--exclusive", "--output=/dev/null")
    _slurm("sbatch", *options, "--wrap=sleep 5")


def use_up_spares(job: SlurmJob, draw: random.Random) -> None:
    """Kills a rank of each node that trains, one after the other has recovered."""
    firsts = range(0, NODES * TASKS_PER_NODE - SPARES, TASKS_PER_NODE)
    for number, first in enumerate(firsts, 1):
        kill_rank(first + draw.randrange(TASKS_PER_NODE))
        job.await_recovery(number)
        report(f"recovery {number} has ended, step {job.committed()}")


def is_as_promised(case: Case, job: SlurmJob) -> bool:
    """Whether a job that ended did so as docs/operate/slurm.md has it for its case."""
    outcome, log = job.outcome(), (job.folder / "log").read_text()
    held = (outcome.state, outcome.restarts) == ("COMPLETED", int(case in QUEUED_AGAIN))
    if case is Case.GRACE:
        held = held and len(job.saved()) == 1 and "it was preempted" in log
    if case is Case.NO_SPARES:
        again = "its state is kept: it is launched again in this allocation"
        held = held and job.recoveries() == SPARES + 1 and log.count(again) == 1
    return held and not any(job.lost_steps())


def main(case: str, seed: str, folder: str, steps: str) -> int:
    """Runs a case; its digest lies in the folder, and its last line is how the job ended."""
    path = Path(folder)
    path.mkdir(parents=True)
    job = SlurmJob(path, int(steps))
    strike(Case(case), job, random.Random(f"{case} {seed}"))  # noqa: S311
    outcome = job.await_end()
    report(f"{case}: {outcome}, step {job.committed()}, lost steps {job.lost_steps()}")
    return 0 if is_as_promised(Case(case), job) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
