"""A pytest plugin: every test that leaks a thread, descriptor, child, file or group fails."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from megatron_moevement.testing.leaks import ResourceKind, leaked_since, open_resources

ONE_AT_A_TIME = "one at a time"
"""The group of tests of which pytest-xdist runs none beside another one."""
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
    others = {ResourceKind.SHARED_MEMORY} if _is_beside_others(request) else ()
    if leaked := leaked_since(before, ignoring=others):
        pytest.fail("leaked: " + "; ".join(str(resource) for resource in leaked), pytrace=False)


def _is_beside_others(request: pytest.FixtureRequest) -> bool:
    """Whether another worker of pytest-xdist may make files in shared memory meanwhile."""
    return hasattr(request.config, "workerinput") and not any(
        ONE_AT_A_TIME in marker.args for marker in request.node.iter_markers("xdist_group")
    )
