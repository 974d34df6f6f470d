# SPDX-License-Identifier: Apache-2.0
"""Health: a process that fails its check ends before it joins a generation; a spare comes in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta

from nvidia_resiliency_ext.inprocess.health_check import CudaHealthCheck, HealthCheck
from nvidia_resiliency_ext.inprocess.state import FrozenState

_check_gpu = CudaHealthCheck(timedelta(seconds=10))


@dataclasses.dataclass(frozen=True)
class ProcessHealth(HealthCheck):  # type: ignore[misc]  # upstream is not typed
    """Looks at the machine, and at the GPU where the process has used it.

    The training thread calls it at the start of a generation, spares too, and after an interrupted
    one.

    Attributes:
        check_host: raises an exception where this process had better not go on.
    """

    check_host: Callable[[], None]

    def __call__(self, state: FrozenState) -> FrozenState:
        """Passes the state on.

        Raises:
            Exception: what is not healthy.
        """
        self.check_host()
        try:
            return _check_gpu(state)
        except Exception as error:
            raise RuntimeError(
                f"the GPU does not answer: {type(error).__name__} {error}"
            ) from error
