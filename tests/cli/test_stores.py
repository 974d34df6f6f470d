# SPDX-License-Identifier: Apache-2.0
"""`moevement stores` serves two stores until it is told to end."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

COMMAND = [sys.executable, "-m", "megatron_moevement.cli", "stores"]


def test_it_serves_both_stores_until_sigterm():
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True) as process:
        try:
            said = dict(pair.split("=") for pair in process.stdout.readline().split())
            ports = {int(said["MASTER_PORT"]), int(said["MOEVEMENT_CONTROL_PORT"])}
            assert len(ports) == 2
            for port in ports:
                store = dist.TCPStore(said["MASTER_ADDR"], port, None, False, timedelta(seconds=20))
                store.set("key", str(port))
                assert store.get("key") == str(port).encode()
                del store
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_programs_read_one_line_while_it_serves():
    environment = {**os.environ, "MOEVEMENT_LAUNCH": "", "MOEVEMENT_SECRET": "s" * 32}
    command = [*COMMAND, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            needed = json.loads(process.stdout.readline())
            address = (needed["MASTER_ADDR"], int(needed["MASTER_PORT"]))
            socket.create_connection(address, 20).close()
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == ""
    assert all(isinstance(value, str) for value in needed.values())  # as an environment has them
    assert needed["MOEVEMENT_STORE_PORT"] == needed["MASTER_PORT"]
    assert "MOEVEMENT_LAUNCH" in needed
    assert "MOEVEMENT_SECRET" not in needed  # it stays where it is


def test_a_signal_that_is_ignored_from_the_start_does_not_end_it():
    ignoring = ["sh", "-c", 'trap "" TERM; exec "$@"', "sh", *COMMAND]
    with subprocess.Popen(ignoring, stdout=subprocess.PIPE, text=True) as process:
        try:
            said = dict(pair.split("=") for pair in process.stdout.readline().split())
            assert said["MOEVEMENT_STORE_PORT"] == said["MASTER_PORT"]
            process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
            port = int(said["MASTER_PORT"])
            store = dist.TCPStore(said["MASTER_ADDR"], port, None, False, timedelta(seconds=20))
            store.set("key", "served")
            assert store.get("key") == b"served"
            del store
        finally:
            process.kill()


def test_a_port_that_is_taken_is_told_about():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*COMMAND, "--port", str(port)], capture_output=True, text=True, check=False
        )
    assert done.returncode == 2
    assert f"can't listen on 127.0.0.1, ports ({port}, {port + 1})" in done.stderr


MANY = 1200
"""Connections; more than a process may have open at first on most machines."""


def test_it_serves_more_connections_than_its_soft_limit_of_open_files():
    limited = ["sh", "-c", 'ulimit -S -n 256; exec "$@"', "sh", *COMMAND]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with (
            subprocess.Popen(limited, stdout=subprocess.PIPE, text=True) as process,
            contextlib.ExitStack() as opened,
        ):
            said = dict(pair.split("=") for pair in process.stdout.readline().split())
            opened.callback(process.kill)
            port = int(said["MASTER_PORT"])
            for _ in range(MANY):
                opened.enter_context(socket.create_connection((said["MASTER_ADDR"], port)))
            store = dist.TCPStore(said["MASTER_ADDR"], port, None, False, timedelta(seconds=20))
            store.set("key", "served")
            assert store.get("key") == b"served"
            del store
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_job_with_more_processes_than_open_files_is_refused_with_numbers():
    limited = ["sh", "-c", 'ulimit -n 1024; exec "$@"', "sh", *COMMAND, "--processes", "341"]
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "341 processes need 1428 open files, and the hard limit is 1024" in done.stderr
