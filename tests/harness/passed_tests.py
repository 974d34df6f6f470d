# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for campaigns that may be killed: tests that have passed are not run again.

python -m pytest -p tests.harness.passed_tests --passed-tests FILE ...
"""

from __future__ import annotations

from pathlib import Path

import pytest

_OPTION = "--passed-tests"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option."""
    parser.addoption(
        _OPTION, metavar="FILE", help="skip the tests named there, add those that pass"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the plugin when the option is given."""
    file = config.getoption(_OPTION)
    if file is not None:
        config.pluginmanager.register(PassedTests(Path(file)))


class PassedTests:
    """The tests that have passed, one line each in a file."""

    def __init__(self, file: Path) -> None:
        """Reads the file, if it is there.

        A line counts when it is whole: a killed campaign may have left half of one.
        """
        self._file = file
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        self._before = {line[:-1] for line in text.splitlines(keepends=True) if line[-1] == "\n"}
        self._failed: set[str] = set()

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leaves out what has passed before."""
        passed = [item for item in items if item.nodeid in self._before]
        if passed:
            config.hook.pytest_deselected(items=passed)
            items[:] = [item for item in items if item.nodeid not in self._before]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes a test whose set-up, call and teardown have passed."""
        if not report.passed:
            self._failed.add(report.nodeid)
        if report.when == "teardown" and report.nodeid not in self._failed:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                # After half a line of a killed campaign, a new one has to begin.
                file.write(f"\n{report.nodeid}\n")
