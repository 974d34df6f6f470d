"""Fault tolerance: which strategy protects a job, and what it may take."""

from __future__ import annotations

import dataclasses

from megatron_moevement.errors import UserError
from megatron_moevement.settings.flags import Range, count, flag, not_negative, positive

_ABOVE_1 = Range("above 1", lambda value: value > 1)


OFF = "off"
"""Names the strategy of a job that durable checkpoints alone protect."""


@dataclasses.dataclass(frozen=True)
class FaultTolerance:
    """Protection against the loss of processes and nodes."""

    moevement_strategy: str = flag(OFF, "how the job is protected")
    moevement_window: int = count(4, "sparse snapshots that make a sparse checkpoint (W)")
    moevement_replicas: int = not_negative(
        2, "copies of every snapshot in other failure domains (r)"
    )
    moevement_strict_replicas: bool = flag(
        False, "fail when there are too few failure domains for the copies"
    )
    moevement_failure_domain: str | None = flag(
        None, "what this process may be lost together with (default: its host)", metavar="NAME"
    )
    moevement_no_frozen_skip: bool = flag(
        False, "compute weight gradients of frozen operators in a replay, and drop them"
    )
    moevement_no_upstream_log: bool = flag(
        False, "don't log what crosses stage boundaries: a lost stage takes all others back with it"
    )
    moevement_no_replica_copy: bool = flag(
        False, "replay what is lost even where another rank still holds the same state"
    )
    moevement_no_adoption: bool = flag(
        False, "don't take over what a dead process left on the machine, but its copies alone"
    )
    moevement_recover_only: bool = flag(
        False, "save what a killed job left in memory as a checkpoint in --save, train nothing"
    )
    moevement_operators: str | None = flag(
        None, "write what is captured in which slot as JSON, train nothing", metavar="FILE"
    )
    moevement_store_dir: str | None = flag(
        None, "folder in memory for snapshots (default: /dev/shm/moevement-<uid>)", metavar="DIR"
    )
    moevement_run_id: str | None = flag(
        None, "name of the run, under which a relaunch finds its snapshots", metavar="NAME"
    )
    moevement_host_memory_limit_gb: float | None = positive(
        None, "most host memory that a process takes for snapshots"
    )
    moevement_replication_interface: str = flag(
        "127.0.0.1",
        "where snapshots are received: an address or an interface of this machine, with "
        "{local_rank} in it or several by commas one for each local rank",
        metavar="ADDRESS",
    )
    moevement_audit_interval: int | None = count(
        None,
        "compare what ranks with the same state captured, every so many steps",
    )
    moevement_slow_rank_factor: float = flag(
        2.0, "report a rank that computes so many times longer than the median", within=_ABOVE_1
    )

    @property
    def is_on(self) -> bool:
        """Whether anything beyond durable checkpoints protects the job."""
        return self.moevement_strategy != OFF

    def of_process(self, local_rank: int) -> FaultTolerance:
        """Returns the same with the interface of one process of a machine."""
        places = self.moevement_replication_interface.split(",")
        place = places[local_rank % len(places)].replace("{local_rank}", str(local_rank))
        return dataclasses.replace(self, moevement_replication_interface=place)

    @property
    def host_memory_limit_bytes(self) -> int | None:
        """Most host memory that a process takes for snapshots; None: no limit."""
        limit_gb = self.moevement_host_memory_limit_gb
        return None if limit_gb is None else round(limit_gb * 1e9)

    @property
    def makes_copies(self) -> bool:
        """Whether processes keep snapshots of others."""
        return self.is_on and self.moevement_replicas > 0 and not self.moevement_recover_only


def check_fault_tolerance(settings: FaultTolerance, save: str | None) -> None:
    """Checks what can be checked without the other ranks.

    Raises:
        UserError: a name can't be that of a folder, or a flag lacks another one.
    """
    if settings.moevement_recover_only and not settings.is_on:
        raise UserError(
            "--moevement-recover-only recovers what a strategy left in memory: give "
            "--moevement-strategy moevement, and the other flags of the job"
        )
    if settings.moevement_recover_only and save is None:
        raise UserError("--moevement-recover-only saves a checkpoint: give --save DIR")
    name = settings.moevement_run_id
    if name is not None and (not name or "/" in name or name.startswith(".")):
        raise UserError(
            f"--moevement-run-id {name!r} is no name for a folder: use letters, digits and dashes"
        )
