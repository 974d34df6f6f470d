# SPDX-License-Identifier: Apache-2.0
"""An object store with the interface of S3, in a process of its own.

.venv/bin/pip install s3fs "moto[server]"
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import fsspec
import pytest


class ObjectStore(NamedTuple):
    """One without buckets.

    Attributes:
        system: of fsspec.
        environment: in which s3fs reaches it.
    """

    system: Any
    environment: Mapping[str, str]


@pytest.fixture(scope="module")
def object_store() -> Iterator[ObjectStore]:
    """Serves one for the tests of a module, where it is installed."""
    if not all(map(importlib.util.find_spec, ("moto", "s3fs"))):
        pytest.skip("s3fs and moto are not installed")
    with served() as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # of another module's server
        system = fsspec.filesystem("s3")
        system.ls("")  # a library's own threads begin here, not in a test
        yield ObjectStore(system, environment)


@contextlib.contextmanager
def served() -> Iterator[dict[str, str]]:
    """Serves one; yields the environment in which s3fs reaches it."""
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        yield {
            "AWS_ENDPOINT_URL": server.stdout.readline().strip(),
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        server.kill()


def main() -> None:
    """Serves until standard input is closed; the first line of output is where."""
    server = importlib.import_module("moto.server").ThreadedMotoServer(
        "127.0.0.1", 0, verbose=False
    )
    server.start()
    host, port = server.get_host_and_port()
    sys.stdout.write(f"http://{host}:{port}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
