# SPDX-License-Identifier: Apache-2.0
"""Checks the project on this machine's GPU, part by part; without one, what a CPU can show of it.

./scripts/gpu_check.sh [--part NAME...] [--again] [--report] [--small] [--results FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from megatron_moevement.backends.backend import BackendName, choose, load
from tests.harness.gpu_check.machine import name_of_machine
from tests.harness.gpu_check.part import PARTS, Part
from tests.harness.gpu_check.results import Conditions, Found, Result, Scale, State, newest, table

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 460.0
"""Of a part."""
CHECKED = ("megatron_moevement", "patches", "tests/harness", "benchmarks", "scripts")
_TOLD_CHARACTERS = 3000
_REMOVALS = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts that are due; returns 1 if one of them is red."""
    options = _options(argv)
    if options.inside is not None:
        return _run_inside(PARTS[options.inside], Scale(options.scale), options.results)
    has_gpu = choose(None) is BackendName.CUDA
    scale = Scale.SMALL if options.small or not has_gpu else Scale.FULL
    conditions = Conditions(name_of_machine(), sources_digest(), scale.value)
    chosen = options.part or list(PARTS)
    for name in [] if options.report else chosen:
        before = newest(options.results, name)
        if before is not None and before.holds_for(conditions) and not options.again:
            print(f"{name}: green already", flush=True)
            continue
        print(f"{name}: {PARTS[name].shows} ...", flush=True)
        result = _run(PARTS[name], conditions)
        result.save(options.results)
        print(f"{name}: {result.state.value}, {result.duration_s:.0f} s", flush=True)
        for problem in result.problems:
            print(f"  {problem}", flush=True)
    results = [one for name in chosen if (one := newest(options.results, name)) is not None]
    print("\n" + table(results))
    return int(any(one.state is State.RED for one in results))


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh",
        description="Checks the project on this machine's GPU; exit code 1: a part is red.",
        epilog="; ".join(f"{part.name}: {part.shows}" for part in PARTS.values()),
        allow_abbrev=False,
    )
    parser.add_argument("--part", action="append", choices=list(PARTS), help="run this part alone")
    parser.add_argument("--again", action="store_true", help="run what is green already, too")
    parser.add_argument("--report", action="store_true", help="print the table, run nothing")
    parser.add_argument("--small", action="store_true", help="compute little, on a GPU too")
    default = ROOT / "build" / "gpu_check"
    parser.add_argument(
        "--results", type=Path, default=default, help="folder of the results (build/gpu_check)"
    )
    parser.add_argument("--inside", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--scale", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def sources_digest() -> str:
    """Returns a digest of the files that are checked."""
    digest = hashlib.sha256()
    for folder in CHECKED:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _run(part: Part, conditions: Conditions) -> Result:
    """Runs a part in a process of its own, within the limit."""
    began, began_s = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    if torch.cuda.device_count() < part.gpus:
        state, found = State.NEEDS_GPU, Found({"GPUs needed": part.gpus})
    else:
        found = _found_by(part, conditions)
        state = State.RED if found.problems else State.GREEN
    return Result(
        part=part.name,
        state=state,
        began=began,
        duration_s=time.monotonic() - began_s,
        conditions=conditions,
        figures=found.figures,
        problems=list(found.problems),
    )


def _found_by(part: Part, conditions: Conditions) -> Found:
    with _folder_in_memory() as folder:
        document, output = folder / "found.json", folder / "output"
        command = [sys.executable, "-W", "ignore", "-m", __package__, "--inside", part.name]
        command += ["--scale", conditions.scale, "--results", str(document)]
        with output.open("wb") as file:
            child = subprocess.Popen(
                command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True
            )
            try:
                child.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                pass
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if document.exists():
            return Found(**json.loads(document.read_text(encoding="utf-8")))
        told = output.read_text(encoding="utf-8", errors="replace").strip()
        last = told.rpartition("\n")[2]
        why = f"no result within {LIMIT_S:.0f} s, exit code {child.returncode}: {last}"
        return Found({}, [f"{why}\n{told[-_TOLD_CHARACTERS:]}"])


@contextlib.contextmanager
def _folder_in_memory() -> Iterator[Path]:
    """Yields a folder where stores belong; it goes with the part, however that ends."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-", dir="/dev/shm"))
    try:
        yield folder
    finally:
        for _ in range(_REMOVALS):  # a killed rank may write until it is gone
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.1)


def _run_inside(part: Part, scale: Scale, document: Path) -> int:
    """Runs a part in this process; what it found goes into a file."""
    torch.set_num_threads(1)
    load(choose(None)).install()  # before Megatron is imported
    folder = document.parent / "files"
    folder.mkdir()
    found = part.check(scale, folder)
    text = json.dumps({"figures": dict(found.figures), "problems": list(found.problems)})
    document.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
