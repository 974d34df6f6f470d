# SPDX-License-Identifier: Apache-2.0
"""What it costs a step that a tier is written meanwhile: against other steps of the same job.

    .venv/bin/python benchmarks/tier_steps.py             # overlap, 8 minutes

The job of `overhead.py`, protected, writes every second persisted window to
`--moevement-tier-dir`, so that W steps in which a slot is written take turns with W steps in which
none is. Two jobs, as `overhead.py --of` compares them, differ from each other by percents on any
machine; these steps differ by nothing else. The slot of step k is written in step k + 2: it is
complete in step k + 1, and the commit of that is what the writer hears of.

A pair is W steps with writing and the W steps after them. Each figure is a mean over pairs. In
brackets: 95 % bootstrap interval, of pairs. Flags of pretrain_moe.py are added to the defaults.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from overhead import DRAWS, OVERLAP, PROTECTED, SATURATED, Estimate, program
from recovery import running

from megatron_moevement.runtime.observation.events import EventName, EventRecord

BUILD = Path(__file__).resolve().parents[1] / "build"
"""On a disk, as tiers are."""
INTERVAL = 2
"""Windows, of which one is written."""
AT_A_TIME = 20
LATER = 2
"""A slot is written so many steps after its own."""


def durations_of(events: Sequence[EventRecord]) -> dict[int, float]:
    """Returns the seconds that each step took, from the end of the one before, on its last rank."""
    ends: dict[int, float] = {}
    for event in events:
        ends[event.iteration] = max(ends.get(event.iteration, 0.0), event.time)
    return {step: end - ends[step - 1] for step, end in ends.items() if step - 1 in ends}


def pairs_of(
    durations: Mapping[int, float], starts: Sequence[int], window: int
) -> Iterator[tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]:
    """Yields the durations of W steps with writing, and of the W steps after them.

    Args:
        durations: of all steps, by their numbers.
        starts: first steps of the windows that were written.
        window: W.
    """
    for start in starts:
        steps = [start + LATER + number for number in range(INTERVAL * window)]
        if all(step in durations for step in steps):
            taken = np.array([durations[step] for step in steps])
            yield taken[:window], taken[window:]


def estimate(pairs: npt.NDArray[np.float64], draws: int = DRAWS) -> dict[str, Estimate]:
    """Returns the figures of pairs: an array of two means for each."""
    random = np.random.default_rng(0)
    drawn = pairs[random.integers(len(pairs), size=(draws, len(pairs)))].mean(axis=1)

    def of(value: float, resampled: npt.NDArray[np.float64]) -> Estimate:
        low, high = np.quantile(resampled, (0.025, 0.975))
        return Estimate(value, float(low), float(high))

    writing, other = pairs.mean(axis=0)
    return {
        "step with writing (s)": of(float(writing), drawn[:, 0]),
        "step without (s)": of(float(other), drawn[:, 1]),
        "ratio": of(float(writing / other), drawn[:, 0] / drawn[:, 1]),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--mode", choices=(OVERLAP, SATURATED), default=OVERLAP)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=160, help="of a job")
    parser.add_argument("--dropped", type=int, default=20, help="first steps of a job")
    parser.add_argument("--window", type=int, default=4, help="W")
    parser.add_argument("--iteration-s", type=float, default=1.0, help="waits of a step (overlap)")
    options, flags = parser.parse_known_args(argv)
    BUILD.mkdir(exist_ok=True)
    pairs: list[tuple[float, float]] = []
    for _ in range(options.jobs):
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            tiers = (f"--moevement-tier-dir={folder}", f"--moevement-tier-interval={INTERVAL}")
            own = (*PROTECTED, f"--moevement-window={options.window}", *tiers, *flags)
            with running(program(options.mode, options, own)) as job:
                last = options.dropped + options.steps
                for count in range(options.dropped, last, AT_A_TIME):  # patience is for so many
                    job.await_steps(0, count)
                steps = job.await_steps(0, last)
                written = job.events(EventName.TIER_WRITTEN, 0)
            starts = [one.fields["start"] for one in written]
            starts = [start for start in starts if start >= options.dropped]
            found = pairs_of(durations_of(steps), starts, options.window)
            pairs += [(float(writing.mean()), float(other.mean())) for writing, other in found]
    for name, value in estimate(np.array(pairs)).items():
        sys.stdout.write(f"{name}: {value}\n")
    sys.stdout.write(f"pairs of {options.window} and {options.window} steps: {len(pairs)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
