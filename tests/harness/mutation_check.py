# SPDX-License-Identifier: Apache-2.0
"""Shows that the simulator notices wrong decisions: how many seeds until each mutation is found."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron_moevement.errors import ExitCode
from megatron_moevement.testing.campaign import Failure, play
from megatron_moevement.testing.mutations import MUTATIONS, Mutation
from megatron_moevement.testing.world.scenario import scenario_of


def find(mutation: Mutation, seeds: int) -> Failure | None:
    """Returns the failure of the first seed that notices a mutation, None when none does."""
    for seed in range(seeds):
        result = play(scenario_of(seed), mutation.policies)
        if isinstance(result, Failure):
            return result
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one line for each mutation; the exit code is 0 when all are found."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.harness.mutation_check",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument("--seeds", type=int, default=500, metavar="N", help="give up after N")
    args = parser.parse_args(argv)
    missed = 0
    for mutation in MUTATIONS:
        failure = find(mutation, args.seeds)
        if failure is None:
            missed += 1
            print(f"{mutation.name:30} NOT FOUND in {args.seeds} seeds")
        else:
            print(f"{mutation.name:30} seed {failure.scenario.seed:3}  {failure.what}")
    print(f"{len(MUTATIONS) - missed} of {len(MUTATIONS)} mutations found")
    return ExitCode.FAILURE if missed else ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
