# SPDX-License-Identifier: Apache-2.0
"""The explorer's command, started by `scripts/explore.sh`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from megatron_moevement.errors import ExitCode, UserError
from tests.harness.explorer.exploring import explore_seeds, open_explorer
from tests.harness.explorer.mend import Mend
from tests.harness.explorer.report import print_report
from tests.harness.explorer.results import Result, Results, digest_of_sources
from tests.harness.explorer.story import read_story

_DESCRIPTION = """
Draws jobs and what happens to them, runs them, and judges them by what is promised. What came of
each seed is in build/explorer/results.jsonl: seeds that ran with the same sources are left out.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="explore.sh", description=_DESCRIPTION, allow_abbrev=False
    )
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="how many (20)")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="the first of them (0)")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), metavar="M", help="begin no seed later"
    )
    parser.add_argument(
        "--shrink", type=int, default=8, metavar="N", help="runs to make a failure smaller (8)"
    )
    parser.add_argument("--again", action="store_true", help="run seeds that have run, too")
    parser.add_argument("--story", type=Path, metavar="PATH", help="run a kept failure again")
    parser.add_argument(
        "--without",
        type=Mend,
        metavar="MEND",
        help="take a mend out, and end with 0 at the first seed that finds it: "
        + ", ".join(mend.value for mend in Mend),
    )
    parser.add_argument("--report", action="store_true", help="print what was found, run nothing")
    parser.add_argument(
        "--folder", type=Path, default=Path("build/explorer"), help="of results and stories"
    )
    return parser


def main(arguments: list[str]) -> int:
    """Explores; returns 1 when something was not as promised."""
    args = _parser().parse_args(arguments)
    folder: Path = args.folder.resolve()
    results, sources = Results(folder / "results.jsonl"), digest_of_sources()
    if args.report:
        print_report(results.read(), sources)
        return ExitCode.DONE
    if args.story is not None:
        scenario = read_story(args.story)
        with open_explorer(folder, sources) as explorer:
            return _tell(explorer.explore(scenario, args.shrink))
    seeds = list(range(args.first, args.first + args.seeds))
    if args.without is not None:
        return _do_without(args.without, seeds, folder, sources)
    if not args.again:
        done = {result.seed for result in results.read(sources)}
        seeds = [seed for seed in seeds if seed not in done]
    deadline, wrong = time.monotonic() + 60 * args.minutes, 0
    with open_explorer(folder, sources) as explorer:
        for result in explore_seeds(explorer, seeds, results, tries=args.shrink, deadline=deadline):
            wrong += _tell(result)
    return ExitCode.FAILURE if wrong else ExitCode.DONE


def _do_without(mend: Mend, seeds: list[int], folder: Path, sources: str) -> int:
    """Returns 0 when a seed finds that a mend is taken out; its results are kept apart."""
    name = f"without-{mend.value}"
    without, results = f"{sources}-{name}", Results(folder / f"{name}.jsonl")
    with open_explorer(folder, without, mend) as explorer:
        found = explore_seeds(explorer, seeds, results, tries=0, deadline=float("inf"))
        for number, result in enumerate(found, 1):
            if _tell(result):
                print(f"red: {name}: seed {result.seed}, number {number} of {len(seeds)}")
                return ExitCode.DONE
    print(f"NOT FOUND: {name}, in {len(seeds)} seeds")
    return ExitCode.FAILURE


def _tell(result: Result) -> int:
    """Prints what came of a scenario; returns 1 when something was wrong."""
    verdicts = " ".join(result.verdicts) or "no recovery"
    what = f"{result.layout}, W {result.window}, r {result.replicas}, {result.strikes} strikes"
    state = "WRONG" if result.is_wrong else "good"
    print(f"seed {result.seed}: {state}, {what}: {verdicts}, {result.seconds:.0f} s", flush=True)
    for complaint in result.complaints:
        print(f"  {complaint}", flush=True)
    if result.story:
        print(f"  story: {result.story}", flush=True)
    return int(result.is_wrong)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.stderr.write(f"explore.sh: {error}\n")
        sys.exit(error.exit_code)
