# SPDX-License-Identifier: Apache-2.0
"""The report: what the explorer has tried, and what came of it, as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from tests.harness.explorer.results import Result


def print_report(results: Sequence[Result], sources: str, console: Console | None = None) -> None:
    """Prints totals, histograms and failures.

    Args:
        results: of all sources.
        sources: digest of those that are there now.
        console: where to; None: standard output.
    """
    console = console or Console(highlight=False)
    newest = [result for result in results if result.sources == sources]
    console.print(_totals({"these sources": newest, "all sources": results}))
    for title, counted in (
        ("verdict", Counter(one for result in results for one in result.verdicts)),
        ("layout", Counter(result.layout for result in results)),
        ("feature", Counter(one for result in results for one in result.shape)),
        ("W", Counter(f"{result.window}" for result in results)),
        ("r", Counter(f"{result.replicas}" for result in results)),
        ("strikes", Counter(f"{result.strikes}" for result in results)),
        ("launches", Counter(f"{result.launches}" for result in results)),
        ("kind", Counter(one for result in results for one in result.kinds)),
        ("place", Counter(one for result in results for one in result.places)),
    ):
        console.print(_histogram(title, counted))
    wrong = [result for result in results if result.is_wrong]
    if wrong:
        console.print(_failures(wrong))


def longest_row(results: Iterable[Result]) -> int:
    """Returns how many seeds in a row had nothing wrong, at the most."""
    longest = row = 0
    for result in results:
        row = 0 if result.is_wrong else row + 1
        longest = max(longest, row)
    return longest


def _totals(groups: dict[str, Sequence[Result]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in (
        "",
        "seeds",
        "wrong",
        "in a row",
        "hours",
        "recoveries",
        "replayed",
        "lost",
        "from tiers",
    ):
        table.add_column(name, justify="left" if not name else "right")
    for name, results in groups.items():
        table.add_row(
            name,
            str(len(results)),
            str(sum(result.is_wrong for result in results)),
            str(longest_row(results)),
            f"{sum(result.seconds for result in results) / 3600:.2f}",
            str(sum(len(result.verdicts) for result in results)),
            str(sum(sum(result.replayed) for result in results)),
            str(sum(sum(result.lost) for result in results)),
            str(sum(len(result.from_tiers) for result in results)),
        )
    return table


def _histogram(title: str, counted: Counter[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(title)
    table.add_column("", justify="right")
    table.add_column("")
    most = max(counted.values(), default=1)
    for name, count in counted.most_common():
        table.add_row(name, str(count), "#" * max(1, 40 * count // most))
    return table


def _failures(results: Sequence[Result]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("seed", "sources", "wrong"):
        table.add_column(name, overflow="fold")
    for result in results:
        table.add_row(str(result.seed), result.sources, "\n".join(result.complaints))
    return table
