"""Reaping: the last references to process groups of a former generation.

The destructor of a gloo group joins threads that may be stuck until the group's time limit, where a
peer was lost in the middle of a send. So a thread of its own drops the last reference, after a
while: by then nothing else holds one.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

_DELAY = timedelta(seconds=3)
"""Longer than the interrupted step's traceback lives, which the restart frees."""


def bury(remains: list[Any], delay: timedelta = _DELAY) -> None:
    """Drops what a list holds in a while, in a thread that may take its time.

    Args:
        remains: whose objects the caller holds no more; it is emptied.
        delay: until then.
    """

    def reap() -> None:
        time.sleep(delay.total_seconds())
        remains.clear()

    threading.Thread(target=reap, name="reaper", daemon=True).start()
