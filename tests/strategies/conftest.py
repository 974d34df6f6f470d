# SPDX-License-Identifier: Apache-2.0
"""What the tests of strategies share: a text to train on, and runs that nobody interrupts."""

import functools
import shutil
import sys

import pytest

from megatron_moevement.backends import cpu

cpu.install()  # before anything here imports Megatron-Core

from megatron_moevement.policy.copies.placement import Host  # noqa: E402
from megatron_moevement.runtime.coordination.generation import Generation  # noqa: E402
from megatron_moevement.runtime.transport.handshake import Session  # noqa: E402
from megatron_moevement.strategies.moevement.protection.resident_store import (  # noqa: E402
    ResidentStore,
)
from megatron_moevement.strategies.moevement.spare_memory import (  # noqa: E402
    SpareMemory,
)
from tests.harness.interruption import Run  # noqa: E402
from tests.harness.kept_spare import PROCESS, PROCESSES, Board  # noqa: E402
from tests.harness.localized_run import LocalizedRun  # noqa: E402
from tests.harness.random_text import prepare_random_text  # noqa: E402


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Returns the prefix of random text: no two samples of it are the same."""
    return prepare_random_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def uninterrupted(megatron_fork_server, text, tmp_path_factory):
    """Returns the digest of a case that nothing protects and nobody interrupts.

    It takes flags beyond the case's own. Cases that are trained alike share a job, however they
    are protected.
    """
    found = {}

    def digest(case, *flags):
        trained = (case.combination, case.train_iters, flags)
        if trained not in found:
            folder = tmp_path_factory.mktemp("uninterrupted")
            found[trained] = Run(case.program(megatron_fork_server, text, *flags), folder).finish()
            shutil.rmtree(folder)
        return found[trained]

    return digest


@pytest.fixture(scope="session")
def plainly_trained(megatron_fork_server, text, tmp_path_factory):
    """Returns what each rank of a job of `localized_run` ends with that nothing interrupts."""

    @functools.cache
    def train(job, train_iters):
        folder = tmp_path_factory.mktemp("plain")
        return LocalizedRun(megatron_fork_server, job, text, train_iters, folder).train()

    return train


@pytest.fixture
def red():
    """Returns what says how a mutation was seen; pytest shows it with `-s`."""
    return lambda mutation, how: sys.stdout.write(f"red: {mutation}: {how}\n")


@pytest.fixture
def spare(shared_memory):
    """Returns a function that begins a generation of a spare, and ends the one before."""
    kept, generations = ResidentStore(), []

    def begin(limit_bytes=None):
        for former in generations:
            former.close()
        generation = Generation(len(generations), spares=1, board=Board())
        generations.append(generation)
        kept.keep()
        me = Session(b"a secret of this job", PROCESS, generation.number)
        host, sizes = Host(PROCESS, "node2"), {"processes": PROCESSES, "limit_bytes": limit_bytes}
        memory = SpareMemory(kept, shared_memory, me, host, generation.board, **sizes)
        memory.begin(generation, "127.0.0.1")
        return memory, generation

    begin.kept, begin.root = kept, shared_memory
    yield begin
    for generation in generations:
        generation.close()
    kept.close()
