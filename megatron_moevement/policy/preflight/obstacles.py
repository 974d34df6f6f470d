# SPDX-License-Identifier: Apache-2.0
"""Obstacles: why a job that has not started can't work as its flags ask."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megatron_moevement.errors import UserError
from megatron_moevement.policy.copies.memory_budget import check_budget
from megatron_moevement.policy.preflight.forecast import JobForecast


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a machine has for the processes of a job; every node of the job is like it.

    Attributes:
        store_dir: where the files of the job's memory are to lie.
        file_bytes: that the file system there can still hold, what the run has there counted.
        memory_bytes: that the machine and its control groups can still give.
        lockable_bytes: that a process may lock; None without a limit.
        files_in_memory: whether the file system lies in memory.
    """

    store_dir: str
    file_bytes: int
    memory_bytes: int
    lockable_bytes: int | None
    files_in_memory: bool


def obstacles(forecast: JobForecast, machine: Machine | None) -> tuple[str, ...]:
    """Returns why a job can't work, a sentence each; nothing where it can.

    Args:
        machine: what each node is; None where that is not known.
    """
    found = [*_of_window(forecast), *_of_copies(forecast), *_of_limit(forecast)]
    if machine is not None:
        found += [*_of_room(forecast, machine), *_of_locked(forecast, machine)]
    return tuple(found)


def _of_window(forecast: JobForecast) -> Iterator[str]:
    schedule = forecast.schedule
    empty = sum(not operators for operators in schedule.full)
    if empty:
        yield (
            f"W = {schedule.window}: {empty} of its slots would be empty, because the model has "
            f"{len(schedule.slots)} operators; give --moevement-window a smaller W"
        )
    if forecast.train_iters < forecast.persisted_step:
        yield (
            f"W = {schedule.window}: the first window is persisted at step "
            f"{forecast.persisted_step}, and training ends at step {forecast.train_iters}; give "
            "--moevement-window a smaller W"
        )


def _of_copies(forecast: JobForecast) -> Iterator[str]:
    wanted, possible = forecast.replicas
    if possible < wanted:
        yield (
            f"--moevement-replicas {wanted} needs {wanted + 1} failure domains, there are "
            f"{forecast.domains}: the job would keep {possible}; add nodes, divide them "
            "(MOEVEMENT_FAILURE_DOMAIN), or lower it"
        )


def _of_limit(forecast: JobForecast) -> Iterator[str]:
    if forecast.limit_bytes is None:
        return
    accounts = {one.host.process: one.account for one in forecast.processes}
    try:
        check_budget(accounts, forecast.limit_bytes)
    except UserError as error:
        yield f"--moevement-host-memory-limit-gb: {error}"


def _of_room(forecast: JobForecast, machine: Machine) -> Iterator[str]:
    node = max(forecast.nodes, key=lambda node: forecast.nodes[node].file_bytes)
    needed_bytes = forecast.nodes[node].file_bytes
    if needed_bytes > machine.file_bytes:
        yield (
            f"{machine.store_dir}: node {node} needs {needed_bytes} bytes there, and "
            f"{machine.file_bytes} are left; enlarge the file system (a container: --shm-size), "
            "give --moevement-store-dir on another one, lower --moevement-replicas, or give "
            "--moevement-window a smaller W"
        )
    node = max(forecast.nodes, key=forecast.host_bytes)
    needed_bytes = forecast.host_bytes(node)
    if not machine.files_in_memory:
        needed_bytes -= forecast.nodes[node].file_bytes
    if needed_bytes > machine.memory_bytes:
        yield (
            f"node {node} needs {needed_bytes} bytes of host memory, and the machine and its "
            f"control groups have {machine.memory_bytes} left: take more nodes, raise the limit, "
            "lower --moevement-replicas, or give --moevement-window a smaller W"
        )


def _of_locked(forecast: JobForecast, machine: Machine) -> Iterator[str]:
    if forecast.computes_on_host or machine.lockable_bytes is None:
        return  # only copies from a device need locked memory
    worst = max(forecast.processes, key=lambda one: one.pinned_bytes)
    if worst.pinned_bytes > machine.lockable_bytes:
        yield (
            f"process {worst.host.process} locks {worst.pinned_bytes} bytes of host memory and "
            f"may lock {machine.lockable_bytes}; raise the limit of locked memory (ulimit -l; a "
            "container: --ulimit memlock=-1), or give --moevement-window a smaller W"
        )
