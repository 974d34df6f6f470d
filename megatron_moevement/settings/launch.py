# SPDX-License-Identifier: Apache-2.0
"""What the launcher says about this process, in the environment variables of torchrun."""

from __future__ import annotations

import dataclasses
import os
import socket

from megatron_moevement.errors import UserError
from megatron_moevement.settings.secret import Secret

Address = tuple[str, int]

_ONLY_ATTEMPT = "0"
LAUNCH_VARIABLE = "MOEVEMENT_LAUNCH"
"""A name that the launcher makes for each launch; events have it."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the launcher says about this process, as torchrun and `srun` wrappers do.

    Attributes:
        rank: the place in the job that the process occupies; of a spare, until it takes one, its
            own number.
        local_rank: its number on its machine.
        world_size: places in the job.
        failure_domain: what it may be lost together with, unless a flag says otherwise.
        process: its own number; it stays when the process takes another place.
        processes: of the job, spares counted.
        store: where the training's store is served; None for one process by itself.
        control_store: where the store of in-process restart is served, outside of all ranks.
        attempt: name of this start of the job, the same on all of its processes: a launcher that
            restarts them leaves the stores as they are.
        rank_monitor: socket of the process that watches this one, where `ft_launcher` started it.
        secret: what the processes of the job know, and nobody else; None where the launcher made
            none.
    """

    rank: int
    local_rank: int
    world_size: int
    failure_domain: str = ""
    process: int = 0
    processes: int = 1
    store: Address | None = None
    control_store: Address | None = None
    attempt: str = _ONLY_ATTEMPT
    rank_monitor: str | None = None
    secret: Secret | None = None
    name: str | None = None
    """Of this launch among all launches of the job; None where the launcher gives it none."""

    @classmethod
    def from_environment(cls) -> Launch:
        """Reads RANK, LOCAL_RANK and WORLD_SIZE; one process by itself needs none of them.

        WORLD_SIZE counts spares, MOEVEMENT_ACTIVE_RANKS (default: all) does not. The failure domain
        is MOEVEMENT_FAILURE_DOMAIN, else the host. The stores are at MASTER_ADDR, with the ports
        MASTER_PORT and MOEVEMENT_CONTROL_PORT; `ft_launcher` sets the first two anew whenever it
        restarts the processes, so MOEVEMENT_STORE_ADDR and MOEVEMENT_STORE_PORT win.

        Raises:
            UserError: a variable is no number, the rank lies outside of the job, or the secret is
                too short.
        """
        try:
            rank = int(os.environ.get("RANK", "0"))
            processes = int(os.environ.get("WORLD_SIZE", "1"))
            local_rank = int(os.environ.get("LOCAL_RANK", str(rank)))
            active = int(os.environ.get("MOEVEMENT_ACTIVE_RANKS", str(processes)))
            store = _address("MOEVEMENT_STORE_PORT") or _address("MASTER_PORT")
            control = _address("MOEVEMENT_CONTROL_PORT")
        except ValueError as error:
            raise UserError(
                "RANK, LOCAL_RANK, WORLD_SIZE, MOEVEMENT_ACTIVE_RANKS, MASTER_PORT, "
                "MOEVEMENT_STORE_PORT and MOEVEMENT_CONTROL_PORT must be integers: "
                f"{error}"
            ) from error
        if not 0 <= rank < processes:
            raise UserError(
                f"RANK {rank} lies outside of WORLD_SIZE {processes}; mend the launcher"
            )
        domain = os.environ.get("MOEVEMENT_FAILURE_DOMAIN") or socket.gethostname()
        return cls(
            rank=rank,
            local_rank=local_rank,
            world_size=active,
            failure_domain=domain,
            process=rank,
            processes=processes,
            store=store,
            control_store=control,
            attempt=_attempt(),
            rank_monitor=os.environ.get("FT_RANK_MONITOR_IPC_SOCKET"),
            secret=Secret.from_environment(),
            name=_name(),
        )

    def occupying(self, rank: int, world_size: int) -> Launch:
        """Returns the launch of this process in a place of the job."""
        return dataclasses.replace(self, rank=rank, world_size=world_size)


def _address(port_variable: str) -> Address | None:
    host = os.environ.get("MASTER_ADDR")
    if port_variable.startswith("MOEVEMENT_"):
        host = os.environ.get("MOEVEMENT_STORE_ADDR", host)
    port = os.environ.get(port_variable)
    return None if host is None or port is None else (host, int(port))


def _name() -> str | None:
    """Returns the name of this launch: of MOEVEMENT_LAUNCH, and of what `ft_launcher` restarts."""
    attempt = _attempt()
    names = (os.environ.get(LAUNCH_VARIABLE), None if attempt == _ONLY_ATTEMPT else attempt)
    return "-".join(name for name in names if name) or None


def _attempt() -> str:
    """Returns the name of this start of the job.

    Agents of `ft_launcher` may count restarts differently (TORCHELASTIC_RESTART_COUNT); of a start
    they have in common the address that they agreed on.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return _ONLY_ATTEMPT
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    return ":".join(os.environ.get(name, "") for name in names)
