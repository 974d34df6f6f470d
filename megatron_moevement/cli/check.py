# SPDX-License-Identifier: Apache-2.0
"""`moevement check`: what a job takes and what keeps it from working, before it starts."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table

from megatron_moevement.backends.backend import BackendName, choose, load
from megatron_moevement.cli import check_links, check_windows
from megatron_moevement.cli.check_windows import WindowPrediction
from megatron_moevement.cli.output import add_json_flag, show
from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.integrations.megatron.fork.marker import check_fork
from megatron_moevement.policy.preflight.forecast import Cluster, JobForecast, NodeForecast
from megatron_moevement.settings.architecture import with_layers
from megatron_moevement.settings.launch import Launch
from megatron_moevement.training.arguments import Arguments, parse

if TYPE_CHECKING:
    from megatron_moevement.policy.preflight.links import MeasuredLinks
    from megatron_moevement.training.link_measurement import LinkLeader
    from megatron_moevement.training.preflight import Preflight

HELP = "print what a job takes, and what keeps it from working, before it starts"
DESCRIPTION = """
Plans a job from its flags as the job itself does, without starting it and without memory for its
model: host and device memory of each node, what an iteration captures, and how much a recovery
replays. Compares that with this machine, and ends with exit code 2 where the job can't work.
"""
_SHOWN_NODES = 8
"""Rows of the table; the nodes that need most come first."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `moevement check`."""
    parser.usage = (
        "moevement check [--nodes N] [-n N] [--spares N] [--failure-domain WHAT] [--elsewhere] "
        "[--iteration-time SECONDS] [--bandwidth GB/S] [--network-bandwidth GB/S] [--json] "
        "-- FLAGS... | moevement check --paper [--json]"
    )
    nodes, per_node, spares = check_links.launched_sizes()  # strings: refused as flags are
    parser.add_argument(
        "--nodes",
        type=int,
        default=nodes,
        help="nodes of the job (default: those that the launcher or Slurm has started, or 1)",
    )
    parser.add_argument(
        "-n", "--per-node", type=int, default=per_node, help="processes of each node"
    )
    parser.add_argument(
        "--spares", type=int, default=spares, help="processes among them that wait for a rank"
    )
    parser.add_argument(
        "--failure-domain",
        choices=("node", "process"),
        help="what may be lost together; run_local.sh makes it a process (default: node; as "
        "processes of a launch: what the launcher makes it)",
    )
    parser.add_argument(
        "--elsewhere",
        action="store_true",
        help="the nodes are not like this machine: don't look at its memory and interfaces",
    )
    add_json_flag(parser, "everything, of each process, in bytes")
    parser.add_argument(
        "--paper",
        action="store_true",
        help="instead: the memory of the paper's jobs, beside the paper's figures",
    )
    check_links.add_flags(parser)
    check_windows.add_flags(parser)
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="those of the job")


def run(args: argparse.Namespace) -> int:
    """Prints what was found; exit code 2 where the job can't work."""
    launch = Launch.from_environment()
    is_silent = check_links.is_launched() and launch.process != 0
    try:
        if is_silent and (args.paper or args.elsewhere):
            return ExitCode.DONE
        return _run(args, launch)
    except UserError as error:
        if not is_silent:  # process 0 finds the same, or is given it to say
            raise
        return error.exit_code


def _run(args: argparse.Namespace, launch: Launch) -> int:
    if args.paper:
        from megatron_moevement.cli import check_paper  # noqa: PLC0415  (without flags of a job)

        def forecast(flags: Sequence[str], cluster: Cluster) -> JobForecast:
            return look_ahead(flags, cluster, is_here=False)[1].forecast

        return check_paper.run(args, forecast)
    try:
        each = args.failure_domain == "process"
        cluster = Cluster(args.nodes, args.per_node, args.spares, each_is_domain=each)
    except ValueError as error:
        raise UserError(str(error)) from error
    if args.elsewhere or not check_links.is_launched():
        return _report(args, *look_ahead(args.flags, cluster, is_here=not args.elsewhere))
    check_links.check_sizes(cluster, launch)

    def lead(leader: LinkLeader) -> int:
        domains = tuple(one.domain for one in leader.greetings.values())
        asked = () if args.failure_domain else domains
        planned = dataclasses.replace(cluster, domains=asked)
        arguments, found = look_ahead(args.flags, planned, is_here=True)
        links: MeasuredLinks | None = None
        try:
            links = leader.measure(found.forecast)
            refused = tuple(links.obstacles)
        except UserError as error:
            refused = error.messages
        found = dataclasses.replace(
            found, obstacles=tuple(dict.fromkeys((*found.obstacles, *refused)))
        )
        return _report(args, arguments, found, planned, links)

    return check_links.in_meeting(args, launch, cluster, lead)


def _report(
    args: argparse.Namespace,
    arguments: Arguments,
    found: Preflight,
    cluster: Cluster | None = None,
    links: MeasuredLinks | None = None,
) -> int:
    """Prints what was found; returns the exit code.

    Args:
        links: what the processes of a launch have measured; None where nothing was.
    """
    rates = None if links is None else links.rates
    predicted = WindowPrediction.of(args, found.forecast, rates)
    measured: list[RenderableType] = []
    if links is not None and cluster is not None:
        measured += check_links.shown(links, cluster)
    document = {
        **_document(arguments, found),
        "links": None if links is None else check_links.document(links),
        "prediction": None if predicted is None else predicted.document(),
    }
    measured += [check_windows.UNKNOWN] if predicted is None else predicted.shown()
    show(args, document, _shown(arguments, found, measured))
    for obstacle in found.obstacles:
        print(f"moevement check: {obstacle}", file=sys.stderr)
    return ExitCode.BAD_ARGUMENTS if found.obstacles else ExitCode.DONE


def look_ahead(
    flags: Sequence[str], cluster: Cluster, *, is_here: bool
) -> tuple[Arguments, Preflight]:
    """Parses the flags of a job as the job does, and looks at it.

    Args:
        is_here: whether every node of the job is like this machine.

    Raises:
        UserError: the job would refuse the flags, or nothing would protect it.
    """
    arguments = parse(flags, cluster.processes, cluster.processes - cluster.spares)
    if not arguments.fault_tolerance.is_on:
        raise UserError(
            "--moevement-strategy off: nothing protects the job, and it takes no memory for that; "
            "give --moevement-strategy moevement"
        )
    cluster = dataclasses.replace(
        cluster,
        spares=cluster.processes - arguments.world_size,
        domain=arguments.fault_tolerance.moevement_failure_domain,
    )
    wanted = arguments.run.moevement_backend
    # Sizes are the same on every device, so a machine without a GPU can plan for others.
    built_on = None if wanted is BackendName.CUDA and not is_here else wanted
    backend = load(choose(built_on))
    check_fork()
    layers = with_layers(arguments.architecture, on_gpu=backend.name is BackendName.CUDA)
    run_flags = dataclasses.replace(arguments.run, moevement_backend=backend.name)
    arguments = dataclasses.replace(arguments, architecture=layers, run=run_flags)
    backend.install()
    with warnings.catch_warnings():  # of what is not installed, and how to train better
        warnings.simplefilter("ignore")
        from megatron_moevement.training.preflight import preflight  # noqa: PLC0415  (Megatron)

        device = wanted or backend.name
        return arguments, preflight(arguments, cluster, backend, device=device, is_here=is_here)


def _shown(
    arguments: Arguments, found: Preflight, of_links: Sequence[RenderableType]
) -> list[RenderableType]:
    shown = [*_lines(arguments, found), _table(found.forecast), *of_links]
    if not found.obstacles:
        shown.append("nothing stands in the way of this job" + _unseen(found))
    return shown


def _unseen(found: Preflight) -> str:
    return "" if found.machine else ", as far as its flags and its plan show"


def _lines(arguments: Arguments, found: Preflight) -> list[str]:
    """Returns what the job does, and what the machine has, a line each."""
    forecast, parallelism = found.forecast, arguments.parallelism
    schedule = forecast.schedule
    least, most = min(forecast.captured_bytes), max(forecast.captured_bytes)
    wanted, possible = forecast.replicas
    sent_bytes = sum(max(each) for each in schedule.bytes_by_slot.values()) * possible
    lines = [
        f"{arguments.world_size} ranks (PP {parallelism.pipeline_model_parallel_size}, TP "
        f"{parallelism.tensor_model_parallel_size}, EP {parallelism.expert_model_parallel_size}) "
        f"and {len(forecast.processes) - arguments.world_size} spares on {len(forecast.nodes)} "
        f"nodes in {forecast.domains} failure domains, r = {wanted}",
        f"W = {schedule.window}{_later(forecast)}: an iteration captures {decimal(least)} to "
        f"{decimal(most)} on the rank with the largest slot, and sends up to {decimal(sent_bytes)} "
        f"in the job; a window is persisted from step {forecast.persisted_step} on",
        f"a recovery replays at most {forecast.replayed_steps} steps, and the interrupted one",
        _timeouts(arguments),
    ]
    if found.machine is not None:
        lines.append(_machine(found))
    if arguments.without_effect:
        lines.append(f"without an effect here: {', '.join(arguments.without_effect)}")
    return lines


def _later(forecast: JobForecast) -> str:
    """Returns which W follow, where the job may come to others."""
    return "" if forecast.limits is None else ", later {} to {}".format(*forecast.limits)


def _timeouts(arguments: Arguments) -> str:
    limit = f"time-outs: collectives {arguments.parallelism.distributed_timeout_minutes:g} min"
    restart = arguments.restart
    if not restart.inprocess_restart:
        return f"{limit}; no restart in place"
    shown = ("heartbeat_timeout", "soft_timeout", "hard_timeout", "barrier_timeout")
    times = [
        f"{name.replace('_', ' ')} {restart.times[name].total_seconds():g} s" for name in shown
    ]
    return f"{limit}; restart in place: {', '.join(times)}"


def _machine(found: Preflight) -> str:
    machine = found.machine
    assert machine is not None
    locked = machine.lockable_bytes
    addresses = ", ".join(dict.fromkeys(found.addresses)) or "none"
    return (
        f"this machine: {decimal(machine.file_bytes)} left for {machine.store_dir}, "
        f"{decimal(machine.memory_bytes)} of memory with the limits of control groups, may lock "
        f"{'any memory' if locked is None else decimal(locked)}, receives copies at {addresses}"
    )


def _table(forecast: JobForecast) -> Table:
    """Returns a row for each node, those that need most first."""
    nodes = sorted(forecast.nodes, key=lambda node: (-forecast.host_bytes(node), node))
    rows = {
        str(node): _figures(forecast, forecast.nodes[node], forecast.host_bytes(node))
        for node in nodes[:_SHOWN_NODES]
    }
    if len(nodes) > 1:
        whole = NodeForecast.of(forecast.processes)
        name = f"all {len(nodes)}"
        rows[name] = _figures(forecast, whole, sum(map(forecast.host_bytes, nodes)))
    most = max(max(figures.values()) for figures in rows.values())
    unit, divisor = next((name, size) for name, size in _UNITS if most >= size or size == 1)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(f"node, {unit}", no_wrap=True)
    for title in rows[str(nodes[0])]:
        table.add_column(title, justify="right", no_wrap=True)
    for name, figures in rows.items():
        table.add_row(name, *(f"{value / divisor:.1f}" for value in figures.values()))
    return table


_UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("B", 1))


def _figures(forecast: JobForecast, node: NodeForecast, host_bytes: int) -> dict[str, int]:
    account, on_host = node.account, forecast.computes_on_host
    saves = any(one.saving_bytes for one in forecast.processes)
    return {
        "own X": account.own_slots_bytes,
        "log Y": account.logs_bytes,
        "copies": account.held_slots_bytes,
        "journal": account.ledger_bytes,
        **({"model": node.state_bytes} if on_host else {}),
        **({"saves": node.saving_bytes} if saves else {}),
        "host": host_bytes,
        "in files": node.file_bytes,
        "reserve": node.reserve_bytes,
        **({} if on_host else {"device": node.state_bytes}),
    }


def _document(arguments: Arguments, found: Preflight) -> dict[str, Any]:
    """Returns everything that was found as JSON; sizes in bytes, times in seconds."""
    forecast = found.forecast
    schedule, machine = forecast.schedule, found.machine
    wanted, possible = forecast.replicas
    return {
        "ranks": arguments.world_size,
        "window": schedule.window,
        "limits": list(forecast.limits or (schedule.window, schedule.window)),
        "schedule": schedule.digest,
        "replicas": {"wanted": wanted, "possible": possible, "domains": forecast.domains},
        "captured_bytes": {
            str(rank): list(each) for rank, each in sorted(schedule.bytes_by_slot.items())
        },
        "replayed_steps": forecast.replayed_steps,
        "persisted_step": forecast.persisted_step,
        "timeouts_s": {
            "collectives": arguments.parallelism.distributed_timeout_minutes * 60,
            **{
                name: time.total_seconds()
                for name, time in arguments.restart.times.items()
                if arguments.restart.inprocess_restart
            },
        },
        "processes": [
            {
                "process": one.host.process,
                "node": one.node,
                "domain": one.host.domain,
                "rank": None if one.host.rank is None else str(one.host.rank),
                **vars(one.account),
                "total_bytes": one.account.total_bytes,
                "file_bytes": one.file_bytes,
                "reserve_bytes": one.reserve_bytes,
                "pinned_bytes": 0 if forecast.computes_on_host else one.pinned_bytes,
                "state_bytes": one.state_bytes,
                "saving_bytes": one.saving_bytes,
            }
            for one in forecast.processes
        ],
        "nodes": {
            str(node): _figures(forecast, each, forecast.host_bytes(node))
            for node, each in forecast.nodes.items()
        },
        "machine": None if machine is None else {**vars(machine), "addresses": found.addresses},
        "obstacles": list(found.obstacles),
    }
