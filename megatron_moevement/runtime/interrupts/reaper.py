# SPDX-License-Identifier: Apache-2.0
"""Reaping: the last references to process groups of a former generation.

The destructor of a gloo group joins threads. One may be stuck until the group's time limit: where a
peer was lost in the middle of a send, gloo can lose the wake-up of `waitSend`, and nothing reaches
it. So each group's last reference is dropped in a thread of its own, and a group that is stuck
keeps no other. The training thread would hang in a destructor that it runs itself. What autograd
did not compute of an interrupted backward pass, it drops in the midst of the next one; so a group
waits until nobody else holds a reference.
"""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta
from typing import Any

_DELAY = timedelta(seconds=3)
"""By then the restart has freed the interrupted step's traceback; as long between two looks."""
_PATIENCE = timedelta(seconds=0.5)
"""With one group, before the next one is dropped; hardly any takes a hundredth of it."""
_DROPPING = "dropping a group"
"""Name of threads."""
_OURS = 2
"""References to what one list holds, as the interpreter counts them: the list's, and the call's."""


def bury(remains: list[Any], delay: timedelta = _DELAY) -> None:
    """Drops what a list holds in a while, in threads that may take their time.

    Args:
        remains: objects of which the caller holds no more references; it is emptied.
        delay: until then, and until those that others hold are looked at again.
    """

    def reap() -> None:
        while remains:
            time.sleep(delay.total_seconds())
            for _ in range(len(remains)):
                last = [remains.pop(0)]
                if sys.getrefcount(last[0]) > _OURS:
                    remains.append(last.pop())
                    continue
                dropping = threading.Thread(target=last.clear, name=_DROPPING, daemon=True)
                dropping.start()
                dropping.join(_PATIENCE.total_seconds())

    threading.Thread(target=reap, name="reaper", daemon=True).start()


def count_stuck() -> int:
    """Returns how many objects are being dropped at the moment: those that are stuck take long."""
    return sum(thread.name == _DROPPING for thread in threading.enumerate())
