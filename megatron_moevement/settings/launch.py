"""What the launcher says about this process, in the environment variables of torchrun."""

from __future__ import annotations

import dataclasses
import os
import socket

from megatron_moevement.errors import UserError


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the launcher says about this process, as torchrun and `srun` wrappers do."""

    rank: int
    local_rank: int
    world_size: int
    failure_domain: str = ""
    """What the process may be lost together with, unless a flag says otherwise."""

    @classmethod
    def from_environment(cls) -> Launch:
        """Reads RANK, LOCAL_RANK and WORLD_SIZE; one process by itself needs none of them.

        The failure domain is MOEVEMENT_FAILURE_DOMAIN, else the host.

        Raises:
            UserError: a variable is no number, or the rank lies outside of the job.
        """
        try:
            rank = int(os.environ.get("RANK", "0"))
            world_size = int(os.environ.get("WORLD_SIZE", "1"))
            local_rank = int(os.environ.get("LOCAL_RANK", str(rank)))
        except ValueError as error:
            raise UserError(f"RANK, LOCAL_RANK and WORLD_SIZE must be integers: {error}") from error
        if not 0 <= rank < world_size:
            raise UserError(
                f"RANK {rank} lies outside of WORLD_SIZE {world_size}; mend the launcher"
            )
        domain = os.environ.get("MOEVEMENT_FAILURE_DOMAIN") or socket.gethostname()
        return cls(rank=rank, local_rank=local_rank, world_size=world_size, failure_domain=domain)
