# SPDX-License-Identifier: Apache-2.0
"""`moevement check` as all processes of a launch: process 0 speaks, and all measure the links."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table

from megatron_moevement.cli.stores import served_at
from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.policy.preflight.forecast import Cluster
from megatron_moevement.policy.preflight.links import MeasuredLinks
from megatron_moevement.settings.flags import POSITIVE, reader
from megatron_moevement.settings.launch import Launch

if TYPE_CHECKING:
    from megatron_moevement.training.link_measurement import LinkLeader

_PATIENCE_S = 60.0
_SHOWN_LINKS = 8
"""Rows of the table; the slowest links come first."""
_PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_launched() -> bool:
    """Returns whether a launcher has started this process and others of a job."""
    return all(name in os.environ for name in _PLACE) and os.environ["WORLD_SIZE"] != "1"


def launched_sizes() -> tuple[str, str, str]:
    """Returns nodes, processes of each and spares, as the launcher has started them.

    Where none has: the nodes of the Slurm allocation, with one process each.
    """
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if not is_launched():
        return nodes, "1", "0"
    try:
        processes = int(os.environ["WORLD_SIZE"])
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
        active = int(os.environ.get("MOEVEMENT_ACTIVE_RANKS", processes))
    except ValueError:  # refused with all other variables of the launcher
        return nodes, "1", "0"
    return str(processes // max(per_node, 1)), str(per_node), str(processes - active)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the measurement."""
    parser.add_argument(
        "--patience-s",
        type=reader(float, POSITIVE),
        default=_PATIENCE_S,
        metavar="SECONDS",
        help="with a process of the launch that gives no sign of life, and with a copy that stops",
    )


def check_sizes(cluster: Cluster, launch: Launch) -> None:
    """Checks that what is planned has as many processes as were launched.

    Raises:
        UserError: it has not.
    """
    if cluster.processes != launch.processes:
        raise UserError(
            f"--nodes {cluster.nodes} with {cluster.per_node} processes each, and the launcher has "
            f"started {launch.processes}: leave --nodes and -n out, or give --elsewhere"
        )


def in_meeting(
    args: argparse.Namespace,
    launch: Launch,
    cluster: Cluster,
    lead: Callable[[LinkLeader], int],
) -> int:
    """Returns the exit code of all processes of a launch.

    Args:
        lead: reports on process 0; returns the exit code.

    Raises:
        UserError: there is no store; on process 0, too: another process does not come.
    """
    from megatron_moevement.runtime.coordination.meeting import (  # noqa: PLC0415  (torch)
        Meeting,
        store_at,
    )
    from megatron_moevement.training.link_measurement import (  # noqa: PLC0415  (torch)
        LinkLeader,
        take_part,
    )

    patience = timedelta(seconds=args.patience_s)
    code: int = ExitCode.FAILURE
    assert launch.store is not None
    # Launchers that serve none leave it to process 0.
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    with (
        _quiet(),
        contextlib.nullcontext() if is_served or launch.process else served_at(launch.store),
        Meeting(store_at(launch.store, patience), launch, patience, cluster.node_of) as meeting,
    ):
        if launch.process:
            return take_part(meeting, launch, args.flags, patience)
        try:
            with LinkLeader(meeting, launch, args.flags, patience) as leader:
                code = lead(leader)
        except UserError as error:
            code = error.exit_code
            raise
        finally:
            meeting.end(code)
    return code


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leaves it to process 0 to say which copies fail."""
    logger = logging.getLogger("megatron_moevement.runtime")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def shown(links: MeasuredLinks, cluster: Cluster) -> Iterator[RenderableType]:
    """Yields what people read of the links."""
    if to_host := links.to_host_bytes_per_s:
        yield (
            f"measured by {len(to_host)} ranks at a time: copies into host memory with checksums "
            f"at {_rate(to_host[0])} on the slowest, {_rate(to_host[len(to_host) // 2])} on the "
            "median one"
        )
    found = links.between_nodes(cluster.node_of)
    if not found:
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("from node", "to node", "at"):
        table.add_column(title, no_wrap=True)
    for title in ("links", "slowest", "median"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in found[:_SHOWN_LINKS]:
        rates = (_rate(one.slowest_bytes_per_s), _rate(one.median_bytes_per_s))
        table.add_row(str(one.sender), str(one.holder), one.address, str(one.count), *rates)
    yield table


def document(links: MeasuredLinks) -> dict[str, Any]:
    """Returns what was measured as JSON; bytes per second."""
    return {
        "processes": {
            str(process): {
                **greeting.document(),
                "to_host_bytes_per_s": links.reports[process].to_host_bytes_per_s,
            }
            for process, greeting in links.greetings.items()
        },
        "sent": [
            {"sender": process, "holder": one.process, "bytes_per_s": one.bytes_per_s}
            for process, report in links.reports.items()
            for one in report.sent
        ],
    }


def _rate(bytes_per_s: float) -> str:
    return f"{decimal(int(bytes_per_s))}/s"
