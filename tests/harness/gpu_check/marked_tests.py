# SPDX-License-Identifier: Apache-2.0
"""The tests that are marked `gpu`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from tests.harness.gpu_check.results import Found, Scale

ROOT = Path(__file__).resolve().parents[3]
MARK = "mark.gpu"


def run_marked(scale: Scale, folder: Path) -> Found:
    """Runs the files that have such tests, and no others of them."""
    del scale
    files = [
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        if MARK in file.read_text(encoding="utf-8")
    ]
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}", *files]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not report.exists():
        return Found({}, [f"pytest ended with {result.returncode}: {result.stdout[-2000:]}"])
    return judged(report)


def judged(report: Path) -> Found:
    """Returns what a report of pytest says: each test has passed, and there is one at least."""
    cases = list(ElementTree.parse(report).iter("testcase"))  # noqa: S314  (our own)
    wrong = [
        f"{case.get('classname')}.{case.get('name')}: {child.tag}: {child.get('message', '')[:300]}"
        for case in cases
        for child in case
        if child.tag in {"failure", "error", "skipped"}
    ]
    problems = wrong if cases else ["no test is marked"]
    return Found({"tests": len(cases), "passed": len(cases) - len(wrong)}, problems)
