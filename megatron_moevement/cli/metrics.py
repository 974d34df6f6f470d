# SPDX-License-Identifier: Apache-2.0
"""Metrics for Prometheus, served by the process that hosts the stores of a job."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from megatron_moevement.errors import UserError

logger = logging.getLogger(__name__)
_MOST = 65535


def add_metrics_address(parser: argparse.ArgumentParser) -> None:
    """Adds `--metrics-address`."""
    parser.add_argument(
        "--metrics-address",
        type=address_of,
        metavar="HOST:PORT",
        help="serve metrics for Prometheus there, from the job's events (default: nowhere)",
    )


def address_of(text: str) -> tuple[str, int]:
    """Returns the address that a text names; port 0 is a free one.

    Raises:
        ArgumentTypeError: it names none.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, such as 127.0.0.1:9464")
    return host, int(port)


def open_metrics(
    stack: contextlib.ExitStack, address: tuple[str, int] | None, event_dir: str | None
) -> Callable[[], None]:
    """Listens for who asks for metrics, until the stack is left; starts no thread.

    Returns:
        What begins to answer.

    Raises:
        UserError: there are no events to make metrics from, or nothing can listen there.
    """
    if address is None:
        return lambda: None
    if event_dir is None:
        raise UserError(
            "--metrics-address: metrics are made from events; give the job --moevement-event-dir"
        )
    # For those alone who ask for it.
    from megatron_moevement.runtime.observation.metrics_server import (  # noqa: PLC0415
        MetricsServer,
    )

    server = stack.enter_context(MetricsServer(address, Path(event_dir)))

    def serve() -> None:
        server.serve()
        host, port = server.address
        logger.info("metrics are served at http://%s:%d/metrics", host, port)

    return serve
