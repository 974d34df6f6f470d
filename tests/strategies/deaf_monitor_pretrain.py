# SPDX-License-Identifier: Apache-2.0
"""The training program of which process 0 ends while its monitor reads nothing that it is sent."""

import functools
import sys
import time

from nvidia_resiliency_ext.inprocess import CallWrapper
from nvidia_resiliency_ext.inprocess.progress_watchdog import Timestamp

from megatron_moevement.settings.launch import Launch
from megatron_moevement.training.program import main

MORE_THAN_A_PIPE_HOLDS = 2000
monitors = []
called = CallWrapper.__call__


@functools.wraps(called)
def call(self, *args):
    returned = called(self, *args)
    monitors.append(self.monitor_process.process_monitor_proc)
    monitors[0].suspend()
    for _ in range(MORE_THAN_A_PIPE_HOLDS):
        self.monitor_process.send_timestamp(Timestamp(auto=time.monotonic()))
    return returned


if __name__ == "__main__":
    if Launch.from_environment().process == 0:
        CallWrapper.__call__ = call
    code = main(sys.argv[1:])
    for monitor in monitors:
        monitor.kill()
    sys.exit(code)
