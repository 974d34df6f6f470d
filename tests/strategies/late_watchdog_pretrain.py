# SPDX-License-Identifier: Apache-2.0
"""The training program of which process 0 ends while its watchdog schedules a call just then."""

import functools
import sys
import threading
import time

from nvidia_resiliency_ext.inprocess import CallWrapper

from megatron_moevement.settings.launch import Launch
from megatron_moevement.training.program import main

UNTIL_THE_OTHER_WAITS_S = 0.2
called = CallWrapper.__call__


class LateEvent(threading.Event):
    """An event that a thread finds unset just before another one sets it."""

    def __init__(self):
        super().__init__()
        self.found = threading.Event()

    def is_set(self):
        if threading.current_thread() is threading.main_thread() or self.found.is_set():
            return super().is_set()
        self.found.set()
        self.wait()
        time.sleep(UNTIL_THE_OTHER_WAITS_S)
        return False


@functools.wraps(called)
def call(self, *args):
    returned = called(self, *args)
    self.progress_watchdog.pause_requested = late = LateEvent()
    late.found.wait()
    return returned


if __name__ == "__main__":
    if Launch.from_environment().process == 0:
        CallWrapper.__call__ = call
    sys.exit(main(sys.argv[1:]))
