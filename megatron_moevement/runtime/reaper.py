"""Reaping: the last references to process groups of a former generation.

The destructor of a gloo group joins threads. One may be stuck until the group's time limit: where a
peer was lost in the middle of a send, gloo can lose the wake-up of `waitSend`, and nothing reaches
it. So each group's last reference is dropped in a thread of its own, after a while: by then nothing
else holds one, and a group that is stuck keeps no other.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

_DELAY = timedelta(seconds=3)
"""Longer than the interrupted step's traceback lives, which the restart frees."""


_PATIENCE = timedelta(seconds=0.5)
"""With one group, before the next one is dropped; hardly any takes a hundredth of it."""
_DROPPING = "dropping a group"
"""Name of threads."""


def bury(remains: list[Any], delay: timedelta = _DELAY) -> None:
    """Drops what a list holds in a while, in threads that may take their time.

    Args:
        remains: whose objects the caller holds no more; it is emptied.
        delay: until then.
    """

    def reap() -> None:
        time.sleep(delay.total_seconds())
        while remains:
            last = [remains.pop()]
            dropping = threading.Thread(target=last.clear, name=_DROPPING, daemon=True)
            dropping.start()
            dropping.join(_PATIENCE.total_seconds())

    threading.Thread(target=reap, name="reaper", daemon=True).start()


def count_stuck() -> int:
    """Returns how many objects are being dropped at the moment: those that are stuck take long."""
    return sum(thread.name == _DROPPING for thread in threading.enumerate())
