# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: every test that leaks a thread, descriptor, child, file or group fails."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from tests.harness.leaks import ResourceKind, leaked_since, open_resources

BESIDE_OTHERS = "--beside-others"
"""Says that another run of tests starts ranks meanwhile, which make files in shared memory."""
_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remembers that a test failed: its traceback keeps open whatever its frames refer to."""
    report = yield
    item.stash[_FAILED] = report.failed or item.stash.get(_FAILED, False)
    return report


@pytest.fixture(autouse=True)
def fail_on_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves something open; set up first, so that it is torn down last."""
    before = open_resources()
    yield
    if request.node.stash.get(_FAILED, False):
        return
    is_beside_others = request.config.getoption(BESIDE_OTHERS, default=False)
    ignoring = {ResourceKind.SHARED_MEMORY} if is_beside_others else ()
    if leaked := leaked_since(before, ignoring=ignoring):
        pytest.fail("leaked: " + "; ".join(str(resource) for resource in leaked), pytrace=False)
