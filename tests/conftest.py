# SPDX-License-Identifier: Apache-2.0
"""What all tests share: the fork servers, the leak check, and what runs where."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.harness.fork_server import ForkServer
from tests.harness.leaks import folder_prefix
from tests.harness.leaks_fixture import (  # noqa: F401  (a plugin of two names)
    BESIDE_OTHERS,
    fail_on_leaks,
    pytest_runtest_makereport,
)
from tests.harness.missing_fixtures import refuse_missing_fixtures
from tests.harness.object_store import object_store  # noqa: F401

# A pool of threads, once started by an operation, would never end: the leak check sees threads.
# And a test's ranks are its parallelism. Set before a test module imports torch or numpy.
for _pool in ("OMP", "MKL", "OPENBLAS"):
    os.environ.setdefault(f"{_pool}_NUM_THREADS", "1")

# `nohup` and shells that start a job in the background leave signals ignored, and programs that
# tests start would inherit that. Tests end some of them by these signals.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# Drawing facts of a whole job takes a while, and on a busy machine any single example may: neither
# says anything about the code. Continuous integration draws the same examples in every run.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("local", _PATIENT)
settings.register_profile("ci", _PATIENT, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


_BESIDE = "tests/training/"
"""Whose ranks wait for nothing but each other, however busy a machine is."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        BESIDE_OTHERS,
        action="store_true",
        help="another run starts ranks, which make files in shared memory",
    )


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    refuse_missing_fixtures(items)
    _mark_one_at_a_time(items)
    _skip_without_gpu(items)


def _mark_one_at_a_time(items: list[pytest.Item]) -> None:
    for item in items:
        is_beside = item.nodeid.startswith(_BESIDE)
        if item.get_closest_marker("distributed") and not is_beside:
            item.add_marker("one_at_a_time")


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needs_gpu:
        return
    import torch  # noqa: PLC0415  (takes a second, for nothing without such a test)

    if not torch.cuda.is_available():
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Opens CUDA before leaks are looked for: what it opens stays until the process ends."""
    if item.get_closest_marker("gpu") and not item.get_closest_marker("skip"):
        import torch  # noqa: PLC0415

        torch.ones(1, device="cuda", requires_grad=True).sum().backward()
        torch.cuda.synchronize()


def pytest_collection_finish() -> None:
    """What was imported stays: there is no garbage in it to look for, test after test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Forks ranks that have torch imported."""
    with ForkServer(preload=["numpy", "pytest", "torch.distributed"]) as server:
        yield server


@pytest.fixture(scope="session")
def megatron_fork_server() -> Iterator[ForkServer]:
    """Forks ranks that have the CPU backend installed and Megatron-Core imported."""
    preload = "tests.harness.fork_server_preload:import_megatron"
    # A process that may be restarted asks its store again and again; each time would be a warning.
    quiet = {"TORCH_CPP_LOG_LEVEL": "error"}
    modules = ["numpy", "pytest", "torch.distributed", preload]
    with ForkServer(preload=modules, env=quiet) as server:
        yield server


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """Returns a folder in /dev/shm that is gone after the test."""
    folder = Path(tempfile.mkdtemp(prefix=folder_prefix(), dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)
