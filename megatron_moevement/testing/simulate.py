# SPDX-License-Identifier: Apache-2.0
"""Runs seeded simulated clusters: `python -m megatron_moevement.testing.simulate --seeds N`.

Exit code 0 when no invariant is violated. The last line is a JSON object that tells in how many
seeds each verdict and each kind of scope occurred, and how many steps recoveries replayed. The
first violation is told as a story, shrunk to a small world, and printed as JSON that can be kept
in `tests/testing/regressions`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from megatron_moevement.errors import ExitCode
from megatron_moevement.testing.campaign import (
    Failure,
    Tally,
    play,
    play_all,
    shrink_failure,
)
from megatron_moevement.testing.mutations import MUTATIONS, mutation_named
from megatron_moevement.testing.regression import Regression
from megatron_moevement.testing.world.scenario import scenario_of


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_moevement.testing.simulate",
        description="Run seeded simulated clusters and check every invariant after every tick.",
        allow_abbrev=False,
    )
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many worlds")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="the first seed")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="worlds at a time; one on each core when left out"
    )
    parser.add_argument(
        "--mutate",
        choices=[mutation.name for mutation in MUTATIONS],
        metavar="NAME",
        help="take one decision wrongly: " + ", ".join(mutation.name for mutation in MUTATIONS),
    )
    return parser


def _tell(seed: int, mutation: str | None) -> None:
    """Prints the story of a failing seed, and of the smallest world that fails alike."""
    policies = None if mutation is None else mutation_named(mutation).policies
    failure = play(scenario_of(seed), policies)
    assert isinstance(failure, Failure)
    print(f"seed {seed}: {failure.detail}\n{failure.story}\n")
    smallest = shrink_failure(failure, policies)
    kept = Regression(mutation, smallest.what, smallest.scenario)
    print(f"shrunk: {smallest.detail}\n{smallest.story}\n{kept.to_json()}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the worlds and returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.seeds < 1 or args.first < 0:
        parser.error(f"--seeds {args.seeds} --first {args.first}: at least 1 and at least 0")
    if args.jobs is not None and args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: at least 1")
    total = Tally()
    for tally in play_all(args.first, args.seeds, args.mutate, jobs=args.jobs):
        if tally.failures and not total.failures:
            _tell(tally.failures[0], args.mutate)
        total.merge(tally)
        if sys.stderr.isatty():
            print(f"\r{total.seeds} seeds", end="", file=sys.stderr)
    print(json.dumps(total.histogram()))
    return ExitCode.FAILURE if total.failures else ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
