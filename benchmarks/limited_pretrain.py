# SPDX-License-Identifier: Apache-2.0
"""The training program on a slow link: `--rate-file=FILE` first, `--stage-s=SECONDS` second.

Stages wait instead of computing, and layers compute nothing (`timed_pretrain.py`). What a process
sends to its peers goes over one link of as many bytes a second as the file says, at any time.
"""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megatron_moevement.backends.backend import choose, load
from megatron_moevement.runtime.transport.handshake import Session
from megatron_moevement.runtime.transport.tcp import TCP
from megatron_moevement.runtime.transport.transport import (
    Address,
    Connection,
    Deadline,
    Listener,
)
from megatron_moevement.training.program import main

_PIECE_BYTES = 64 * 2**10
_LOOK_S = 0.05


class Link:
    """What all connections of this process share."""

    def __init__(self, rate_file: Path) -> None:
        self._file = rate_file
        self._lock = threading.Lock()
        self._rate_bytes_per_s = 1.0
        self._looked_s = self._free_s = 0.0

    def carry(self, size_bytes: int) -> None:
        """Waits until the link has carried some bytes."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._looked_s > _LOOK_S:
                self._rate_bytes_per_s = float(self._file.read_text())
                self._looked_s = now_s
            self._free_s = max(self._free_s, now_s) + size_bytes / self._rate_bytes_per_s
            wait_s = self._free_s - now_s
        time.sleep(wait_s)


class LimitedConnection:
    """A connection that sends over a link."""

    def __init__(self, connection: Connection, link: Link) -> None:
        self._connection, self._link = connection, link
        self.receive_into = connection.receive_into
        self.await_bytes = connection.await_bytes
        self.shut_down = connection.shut_down
        self.close = connection.close

    def send(self, data: bytes | memoryview, deadline: Deadline) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, view.nbytes, _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            self._link.carry(piece.nbytes)
            self._connection.send(piece, deadline)


class LimitedTcp:
    """TCP whose callers send over a link; what is answered is small."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def dial(
        self,
        address: Address,
        deadline: Deadline,
        opened: Callable[[Connection], None] = lambda connection: None,
    ) -> Connection:
        return LimitedConnection(TCP.dial(address, deadline, opened), self._link)

    def listen(self, interface: str) -> Listener:
        return TCP.listen(interface)


def limit_links(rate_file: Path) -> None:
    """Makes every session of this process use a slow link from now on."""
    from megatron_moevement.strategies.moevement.protection.host_memory import (  # noqa: PLC0415
        Endpoint,
    )

    transport = LimitedTcp(Link(rate_file))

    def me(self: Endpoint) -> Session:
        return Session(self.token, self.process, self.generation.number, transport)

    Endpoint.me = property(me)  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    load(choose(None)).install()  # before Megatron is imported
    from timed_stages import leave_layers_out, wait_in_stages

    _, rate_file, stage_s, *flags = sys.argv
    limit_links(Path(rate_file.removeprefix("--rate-file=")))
    wait_in_stages(float(stage_s.removeprefix("--stage-s=")))
    leave_layers_out()
    sys.exit(main(flags))
