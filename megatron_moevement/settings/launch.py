"""What the launcher says about this process, in the environment variables of torchrun."""

from __future__ import annotations

import dataclasses
import os
import socket

from megatron_moevement.errors import UserError

Address = tuple[str, int]


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
    """

    rank: int
    local_rank: int
    world_size: int
    failure_domain: str = ""
    process: int = 0
    processes: int = 1
    store: Address | None = None
    control_store: Address | None = None

    @classmethod
    def from_environment(cls) -> Launch:
        """Reads RANK, LOCAL_RANK and WORLD_SIZE; one process by itself needs none of them.

        WORLD_SIZE counts spares, MOEVEMENT_ACTIVE_RANKS (default: all) does not. The failure domain
        is MOEVEMENT_FAILURE_DOMAIN, else the host. MOEVEMENT_CONTROL_PORT is the port of the
        control store at MASTER_ADDR.

        Raises:
            UserError: a variable is no number, or the rank lies outside of the job.
        """
        try:
            rank = int(os.environ.get("RANK", "0"))
            processes = int(os.environ.get("WORLD_SIZE", "1"))
            local_rank = int(os.environ.get("LOCAL_RANK", str(rank)))
            active = int(os.environ.get("MOEVEMENT_ACTIVE_RANKS", str(processes)))
            store = _address("MASTER_PORT")
            control = _address("MOEVEMENT_CONTROL_PORT")
        except ValueError as error:
            raise UserError(
                "RANK, LOCAL_RANK, WORLD_SIZE, MOEVEMENT_ACTIVE_RANKS, MASTER_PORT and "
                f"MOEVEMENT_CONTROL_PORT must be integers: {error}"
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
        )

    def occupying(self, rank: int, world_size: int) -> Launch:
        """Returns the launch of this process in a place of the job."""
        return dataclasses.replace(self, rank=rank, world_size=world_size)


def _address(port_variable: str) -> Address | None:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get(port_variable)
    return None if host is None or port is None else (host, int(port))
