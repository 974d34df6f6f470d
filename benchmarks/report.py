# SPDX-License-Identifier: Apache-2.0
"""Makes the page of a large synthetic run, opens it in Chromium, and takes pictures of it.

Prints how long `moevement report` took, how large the page is, and how long the browser took until
it was drawn. Fails if the page is larger than `--limit-mb`, takes longer than `--limit-s` to open,
or reports an error. Without Chromium it says so and ends after the page.

    .venv/bin/python benchmarks/report.py --pictures docs/operate
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from megatron_moevement.cli import main as moevement

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where tests.harness is

from tests.harness import browser
from tests.harness.synthetic_run import Shape, SyntheticRun

PICTURES = (
    # name, width, height, colour scheme, script before it
    ("report-light", 1280, 1000, "light", None),
    ("report-dark", 1280, 1400, "dark", "document.getElementById('outage').scrollIntoView()"),
    ("report-phone", 390, 844, "light", None),
)
LOADED = "performance.getEntriesByType('navigation')[0].loadEventEnd"


def page_in(folder: Path, shape: Shape) -> tuple[Path, float]:
    """Makes the page of a synthetic run; returns it and how long that took, in seconds."""
    SyntheticRun(shape).write(folder / "events")
    began = time.perf_counter()
    code = moevement(["report", str(folder / "events"), "--out", str(folder / "report.html")])
    if code:
        sys.exit(code)
    return folder / "report.html", time.perf_counter() - began


def opening_times(program: str, page: Path, repeats: int) -> list[tuple[float, float]]:
    """Returns how long the page took until two frames were drawn, and until it was loaded (s)."""
    found = []
    for _ in range(repeats):
        with browser.opened(program) as tab:
            tab.look(1280, 1000, scheme="light")
            began = time.perf_counter()
            tab.open(page)
            found.append((time.perf_counter() - began, tab.run(LOADED) / 1000))
            if tab.complaints:
                sys.exit(f"the page complains: {tab.complaints}")
    return found


def take_pictures(program: str, page: Path, folder: Path) -> None:
    """Writes a PNG of each kind into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, width, height, scheme, script in PICTURES:
        with browser.opened(program) as tab:
            tab.look(width, height, scheme=scheme)
            tab.open(page)
            if script is not None:
                tab.run(script)
            tab.picture(folder / f"{name}.png")
            print(f"{folder / name}.png: {width} x {height}, {scheme}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5, help="times that the page is opened")
    parser.add_argument("--limit-s", type=float, default=2.0)
    parser.add_argument("--limit-mb", type=float, default=3.0)
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="write PNGs there")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave events and page there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        page, took_s = page_in(folder, Shape(steps=args.steps, faults=args.faults))
        size_mb = page.stat().st_size / 1e6
        print(f"moevement report: {took_s:.1f} s; the page has {size_mb:.2f} MB")
        program = browser.installed()
        if program is None:
            print(f"not opened: none of {', '.join(browser.NAMES)} is installed")
            return 0 if size_mb <= args.limit_mb else 1
        times = opening_times(program, page, args.repeats)
        drawn = [each for each, _ in times]
        loaded = statistics.median(each for _, each in times)
        print(
            f"opened {len(times)} times: drawn after {statistics.median(drawn):.2f} s "
            f"({min(drawn):.2f} to {max(drawn):.2f}), loaded after {loaded:.2f} s"
        )
        if args.pictures is not None:
            take_pictures(program, page, args.pictures)
        return 0 if size_mb <= args.limit_mb and max(drawn) <= args.limit_s else 1


if __name__ == "__main__":
    sys.exit(main())
