# SPDX-License-Identifier: Apache-2.0
"""The training program, measured: `--measure=FILE --profile=FIRST:STEPS --pieces=FIRST:STEPS`.

These come first. It writes the most memory that it took, and of some steps, if asked to, which
calls waited for the device, and what the device did. FIRST is a step from 1 on; of pieces, how many
steps come before.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # where tests.harness is

from megatron_moevement.backends.backend import choose, load
from tests.harness.gpu_check.device_work import device_time_of
from tests.harness.gpu_check.waits import STEP, waits_of

backend = load(choose(None))
backend.install()  # before Megatron is imported

import torch  # noqa: E402

from megatron_moevement.training.loop import TrainingLoop  # noqa: E402
from megatron_moevement.training.program import main  # noqa: E402
from tests.harness.gpu_check import pieces  # noqa: E402


class Profile:
    """Profiles some steps of the training thread and of what runs beside it."""

    def __init__(self, first: int, steps: int) -> None:
        """Profiles nothing yet."""
        self._first, self._end = first, first + steps
        self._profiler: Any = torch.profiler.profile()
        self.found: dict[str, Any] = {"waits": {}, "device": {}}

    def install(self) -> None:
        """Profiles the steps when they come."""
        iterate, numbers = TrainingLoop.iterate, itertools.count(1)

        def profiled(loop: TrainingLoop) -> Any:
            number = next(numbers)
            if number == self._first:
                self._profiler.start()
            if not self._first <= number < self._end:
                return iterate(loop)
            with torch.profiler.record_function(STEP):
                outcome = iterate(loop)
            if number == self._end - 1:
                self._stop()
            return outcome

        setattr(TrainingLoop, "iterate", profiled)  # noqa: B010  (mypy: a method is no variable)

    def _stop(self) -> None:
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        self.found = {"waits": waits_of(events), "device": device_time_of(events)}


def measured(file: str, profiled: str, pieced: str, flags: list[str]) -> int:
    """Trains; returns the exit code."""
    first, number = _two(profiled)
    profile = Profile(first, number)
    if number:
        profile.install()
    before, steps = _two(pieced)
    if steps:
        pieces.install(before, steps)
    code = main(flags)
    found = {"peak_bytes": backend.peak_memory_bytes(), **profile.found}
    Path(file).write_text(json.dumps(found), encoding="utf-8")
    return code


def _two(numbers: str) -> tuple[int, int]:
    one, other = (int(each) for each in numbers.split(":"))
    return one, other


if __name__ == "__main__":
    _, *given = sys.argv
    own_measure, own_profile, own_pieces = (each.partition("=")[2] for each in given[:3])
    sys.exit(measured(own_measure, own_profile, own_pieces, given[3:]))
