# SPDX-License-Identifier: Apache-2.0
"""How the monitor of a process that hangs ends it: where it stands, without waking it first.

NVRx (0.4.1 to 0.7) sends SIGCONT before SIGTERM. A stopped process then goes on for the grace time,
with what it was doing, while the others have given its rank to a spare.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any

from nvidia_resiliency_ext.inprocess import monitor_process

from megatron_moevement.runtime.rebindings import rebind

_POLL_S = 0.005


def end_where_it_stands(process: Any, termination_grace_time: timedelta) -> None:
    """Sends SIGTERM, and SIGKILL after the grace time; a stopped process gets no more than that.

    The monitor process calls it.

    Args:
        process: hangs; psutil's.
    """
    psutil = monitor_process.psutil
    with contextlib.suppress(psutil.NoSuchProcess):
        process.terminate()
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(termination_grace_time.total_seconds())
        while monitor_process.is_process_active(process):
            process.kill()
            time.sleep(_POLL_S)


def mend_termination() -> None:
    """Makes monitors that are started from now on end processes so."""
    rebind(f"{monitor_process.__name__}:terminate_process", end_where_it_stands)
