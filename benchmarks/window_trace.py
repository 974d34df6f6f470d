# SPDX-License-Identifier: Apache-2.0
"""A trace of a job that chooses its own W while a link becomes slower and faster again.

    .venv/bin/python benchmarks/window_trace.py

Real ranks train under `--moevement-window auto` and send their slots over TCP. What each process
sends goes over one link (`limited_pretrain.py`), whose bandwidth falls after some steps and rises
later. Passes are waits, so that an iteration takes the same time at any load of the machine. Each
line is a step: its W, the bandwidth of the link, iteration and stall of the worst rank; and below
it what was chosen and from where on it is in force.

Flags of pretrain_moe.py are added to the defaults and win over them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from recovery import MICRO_BATCHES, RANKS, STAGES, Program, running

from megatron_moevement.runtime.observation.events import EventName, EventRecord, read_events

MODEL = (
    "--model-preset=tiny",
    "--untie-embeddings-and-output-weights",
    "--num-layers=8",
    "--hidden-size=128",
    "--num-attention-heads=4",
    "--ffn-hidden-size=256",
    "--num-experts=8",
    "--moe-router-topk=2",
    "--moe-ffn-hidden-size=256",
    "--seq-length=32",
    "--micro-batch-size=2",
    "--global-batch-size=32",
    "--bf16",
    f"--pipeline-model-parallel-size={STAGES}",
    "--expert-model-parallel-size=2",
    "--train-iters=100000",
    "--lr=1e-4",
    "--eval-iters=0",
    "--log-interval=1",
    "--num-workers=1",
    "--moevement-no-progress-bar",
    "--moevement-strategy=moevement",
    "--moevement-window=auto",
    "--moevement-max-window=4",  # a small ring: stalls show soon
    "--moevement-replicas=1",
)


def window_at(schedules: Sequence[EventRecord], step: int, first: int) -> int:
    """Returns the W that was in force when a step was captured."""
    known = [one for one in schedules if one.fields["first_step"] <= step]
    return int(known[-1].fields["window"]) if known else first


def lines(events: Sequence[EventRecord], rates: Sequence[tuple[int, float]]) -> Iterator[str]:
    """Yields the trace of a job.

    Args:
        rates: of the link, each from a step on.
    """
    own = [event for event in events if event.logical_rank == 0]
    chosen = {one.iteration: one for one in own if one.event is EventName.WINDOW_CHOSEN}
    schedules = [one for one in own if one.event is EventName.SCHEDULE]
    agreed = {one.iteration: one for one in schedules}
    first = next(iter(chosen.values())).fields["former"] if chosen else 0
    yield f"{'step':>5} {'W':>3} {'link MB/s':>10} {'iteration s':>12} {'stall s':>8}"
    for step in range(1, 1 + max(e.iteration for e in own)):
        ranks = [e for e in events if (e.event, e.iteration) == (EventName.ITERATION, step)]
        if not ranks:
            continue
        rate = [value for since, value in rates if since <= step][-1]
        duration_s, stall_s = (
            max(float(e.fields[name]) for e in ranks) for name in ("duration_s", "stall_s")
        )
        yield (
            f"{step:5} {window_at(schedules, step, first):3} {rate / 1e6:10.3g} "
            f"{duration_s:12.3f} {stall_s:8.3f}"
        )
        if step in chosen:
            told = chosen[step].fields
            yield (
                f"      W = {told['window']} instead of {told['former']} ({told['reason']}), "
                f"slots used: {told['used'] or told['window']}: "
                f"slots of {told['slot_bytes'] / 1e6:.3g} MB instead of "
                f"{told['former_slot_bytes'] / 1e6:.3g}, an iteration hides "
                f"{told['budget_bytes'] / 1e6:.3g} MB"
            )
        if step in agreed:
            told = agreed[step].fields
            yield f"      agreed: W = {told['window']} from step {told['first_step']} on"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--fast", type=float, default=200.0, help="bandwidth of the link, MB/s")
    parser.add_argument("--slow", type=float, default=24.0, help="bandwidth while it is slow, MB/s")
    parser.add_argument("--steps", type=int, nargs=3, default=(24, 36, 64), help="of each phase")
    parser.add_argument("--iteration-s", type=float, default=0.5, help="waits of a step")
    options, flags = parser.parse_known_args(argv)
    program_file = str(Path(__file__).with_name("limited_pretrain.py"))
    stage_s = options.iteration_s / (MICRO_BATCHES + STAGES - 1)
    rates: list[tuple[int, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        rate_file = Path(folder) / "rate"
        own = (f"--rate-file={rate_file}", f"--stage-s={stage_s}")
        _set_rate(rate_file, options.fast * 1e6)
        with running(Program((*own, *MODEL, *flags), RANKS, 0, program_file)) as job:
            until = 0
            for rate, steps in zip(
                (options.fast, options.slow, options.fast), options.steps, strict=True
            ):
                _set_rate(rate_file, rate * 1e6)
                rates.append((until + 1, rate * 1e6))
                until += steps
                job.await_steps(0, until)
                sys.stderr.write(f"{time.strftime('%X')}: step {until}\n")
            events = read_events(job.folder / "events")
    sys.stdout.write("\n".join(lines(events, rates)) + "\n")
    return 0


def _set_rate(file: Path, bytes_per_s: float) -> None:
    fresh = file.with_suffix(".new")
    fresh.write_text(str(bytes_per_s))
    fresh.replace(file)


if __name__ == "__main__":
    sys.exit(main())
