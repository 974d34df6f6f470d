"""What is buried ends in the background, and what is stuck keeps nothing else."""

import threading
import time
from datetime import timedelta

from megatron_moevement.runtime.reaper import bury, count_stuck


def test_one_that_is_stuck_is_counted_and_keeps_no_other():
    released, ended = threading.Event(), []

    class Buried:
        def __init__(self, name):
            self.name = name

        def __del__(self):
            if self.name == "stuck":
                released.wait()
            ended.append(self.name)

    remains = [Buried("first"), Buried("stuck"), Buried("last")]
    bury(remains, timedelta(0))
    await_condition(lambda: len(ended) == 2)
    assert (sorted(ended), remains, count_stuck()) == (["first", "last"], [], 1)
    released.set()
    await_condition(lambda: count_stuck() == 0)
    assert ended[-1] == "stuck"


def await_condition(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
