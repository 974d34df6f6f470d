# SPDX-License-Identifier: Apache-2.0
"""The most host memory that the protected job of benchmarks/overhead.py takes, launcher included.

    .venv/bin/python benchmarks/peak_memory.py
    .venv/bin/python benchmarks/peak_memory.py --of ../other       # another checkout, set up there
    .venv/bin/python benchmarks/peak_memory.py --moevement-window=auto

Twice a second from outside: the proportional share (PSS) of each area of memory of all processes,
and what the job's files in /dev/shm take, touched by a process or not; each page counts once. The
parts are those of the moment at which the sum was largest. A version that lets forks copy its log
has it among `other memory of processes`.

Flags of pretrain_moe.py are added to the defaults and win over them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from overhead import PROTECTED, REFERENCE, UNPROTECTED
from recovery import PATIENCE_S, RANKS  # makes tests.harness importable

from tests.harness.random_text import data_flags, prepare_random_text

ROOT = Path(__file__).resolve().parents[1]
SAMPLE_S = 0.5
PATIENCE_OF_STEP_S = 10.0
MB = 10**6
OWN, HELD, FILES = "rings of own slots", "rings of held slots", "other files of the job"
LOG, PROGRAM, LIBRARIES = "upstream log", "other memory of processes", "mapped files on disk"
PARTS = (OWN, HELD, FILES, LOG, PROGRAM, LIBRARIES)
_AREA = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ *(.*)")
_ITERATION = re.compile(r"iteration +(\d+)/")


def part_of_file(name: str) -> str:
    """Returns the part that a file of the job belongs to."""
    if not name.endswith(".ring"):
        return FILES
    return OWN if name.startswith("own-") else HELD


def process_parts(smaps: str, folder: Path) -> Counter[str]:
    """Returns the proportional shares of one process, but for files that have a name in a folder.

    Args:
        smaps: /proc/PID/smaps.
        folder: of the job, in memory.
    """
    parts: Counter[str] = Counter()
    name, share_bytes = "", 0
    for line in smaps.splitlines():
        if match := _AREA.fullmatch(line):
            name = match[1]
        elif line.startswith("Pss:"):
            share_bytes = 1024 * int(line.split()[1])
        elif line.startswith("VmFlags:"):
            unforked = "dc" in line.split()
            parts[_part_of_area(name, unforked, folder)] += share_bytes
    del parts[""]
    return parts


def _part_of_area(name: str, unforked: bool, folder: Path) -> str:
    if name.startswith(f"{folder}/"):
        return FILES if name.endswith("(deleted)") else ""
    if name.startswith("/") and not name.startswith(("/dev/", "/memfd:")):
        return LIBRARIES
    return LOG if unforked and not name else PROGRAM


def job_parts(pid: int, folder: Path) -> Counter[str]:
    """Returns what a job takes now.

    Args:
        pid: of its launcher.
        folder: with all of its files, in memory.
    """
    parts: Counter[str] = Counter()
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            smaps = Path(f"/proc/{process.pid}/smaps").read_text(encoding="utf-8")
            parts += process_parts(smaps, folder)
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            parts[part_of_file(path.name)] += path.lstat().st_blocks * 512
    return parts


@dataclasses.dataclass(frozen=True)
class Peak:
    """The parts of the largest sum, and how many samples there were."""

    parts: Counter[str]
    samples: int


@contextlib.contextmanager
def started(
    checkout: Path, folder: Path, flags: Sequence[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a job of a checkout, whose output goes to a file `log`; yields its launcher."""
    python = str(checkout / ".venv/bin/python")
    launch = [python, "-m", "megatron_moevement.cli.launch", "-n", str(RANKS)]
    places = [
        f"--moevement-event-dir={folder}/events",
        f"--moevement-store-dir={folder}/store",
        f"--data-cache-path={folder}/index",
    ]
    command = [*launch, "--program", "pretrain_moe.py", "--", *flags, *places]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=checkout, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


def iterations(log: Path) -> int:
    """Returns how many steps a job has reported."""
    found = _ITERATION.findall(log.read_text(encoding="utf-8", errors="replace"))
    return max(map(int, found), default=0)


def measure(checkout: Path, steps: int, flags: Sequence[str]) -> Peak:
    """Returns the peak of a job, from its start until it has made some steps."""
    with tempfile.TemporaryDirectory(prefix="moevement_peak_", dir="/dev/shm") as name:
        folder = Path(name)
        (folder / "text").mkdir()
        text = data_flags(prepare_random_text(folder / "text"))
        peak, samples = Counter[str](), 0
        with started(checkout, folder, (*flags, *text)) as launcher:
            deadline = time.monotonic() + PATIENCE_S + PATIENCE_OF_STEP_S * steps
            while iterations(folder / "log") < steps:
                parts = job_parts(launcher.pid, folder)
                peak, samples = max(peak, parts, key=Counter.total), samples + 1
                if launcher.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"the job came to no end:\n{(folder / 'log').read_text()[-4000:]}")
                time.sleep(SAMPLE_S)
    return Peak(peak, samples)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--of", type=Path, default=ROOT, help="checkout (default: this one)")
    parser.add_argument("--steps", type=int, default=30, help="until which the peak is taken")
    parser.add_argument(
        "--unprotected", action="store_true", help="the same job without protection"
    )
    options, flags = parser.parse_known_args(argv)
    protection = UNPROTECTED if options.unprotected else PROTECTED
    peak = measure(options.of.resolve(), options.steps, (*REFERENCE, *protection, *flags))
    lines = [f"{part}: {peak.parts[part] / MB:.0f} MB" for part in PARTS]
    lines.append(f"peak: {peak.parts.total() / MB:.0f} MB of {peak.samples} samples")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
