# SPDX-License-Identifier: Apache-2.0
"""A meeting of a launch's processes in the launcher's store, without groups: process 0 leads.

Notes are sealed JSON. Each process gives signs of life, so that whoever waits for it waits as long
as it lives, and for one that never comes or is gone no longer than a given patience.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from enum import Enum
from typing import Any

import torch.distributed as dist

from megatron_moevement.errors import ExitCode, MoEvementError, UserError
from megatron_moevement.policy.watching.short_lists import look_interval_s
from megatron_moevement.runtime.closing import Closing
from megatron_moevement.runtime.coordination.roll_call import Store, first_proposed
from megatron_moevement.runtime.interrupts.interruptible_wait import interruptibly
from megatron_moevement.runtime.interrupts.open_sockets import await_listener
from megatron_moevement.runtime.security.seal import BrokenSealError, Seal
from megatron_moevement.settings.launch import Address, Launch
from megatron_moevement.settings.secret import SECRET_VARIABLE

_CONNECTING = timedelta(seconds=10)
_POLL_S = 0.02
_FREE_LOOKS = 32
"""So many processes look so often; more share the looks that these would take."""
_LONGEST_POLL_S = 1.0
"""Process 0 does not wait long for the others to read how it ends."""
_SIGNS = 10
"""Signs of life in the time of the patience."""
_LEAVING_S = 2.0
"""That process 0 waits for the others to read how it ends."""
_TOKEN_BYTES = 32
_SHOWN = 8
"""Processes that an error names."""


class Note(Enum):
    """What a note is about."""

    KEY = "key"
    GREETING = "greeting"
    TASK = "task"
    READY = "ready"
    GO = "go"
    REPORT = "report"
    REFUSAL = "refusal"
    END = "end"
    LEFT = "left"


class EndedError(MoEvementError):
    """Process 0 has ended the meeting, or gives no sign of life.

    Attributes:
        code: exit code with which it ends.
    """

    def __init__(self, code: int) -> None:
        super().__init__(f"process 0 has ended the meeting with exit code {code}")
        self.code = code


class Meeting(Closing):
    """The meeting as one process sees it; one thread uses it.

    Attributes:
        token: the key by which the processes recognise each other.
    """

    def __init__(
        self, store: Store, launch: Launch, patience: timedelta, node_of: Callable[[int], int]
    ) -> None:
        """Comes; begins to give signs of life.

        Args:
            store: that all processes reach.
            patience: with a process that gives no sign of life.
            node_of: returns the node of a process, for who looks for one that is missing.
        """
        self._process, self._processes = launch.process, launch.processes
        self._patience_s = patience.total_seconds()
        self._node_of = node_of
        poll_s = look_interval_s(_POLL_S, launch.processes, free=_FREE_LOOKS)
        self._poll_s = min(poll_s, _LONGEST_POLL_S)
        self._come: set[int] = set()
        prefix = f"moevement/meeting/{launch.attempt}"
        self._store: Store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        self.token = self._agreed_token(launch)
        self._seal = Seal(self.token)
        self._over = threading.Event()
        self._living = threading.Thread(target=self._give_signs, name="signs of life", daemon=True)
        self._living.start()

    def _agreed_token(self, launch: Launch) -> bytes:
        """Returns a key of the launch's secret, or one that a process draws where it has none."""
        if launch.secret is not None:
            return launch.secret.derive("meeting", launch.attempt)
        drawn = secrets.token_hex(_TOKEN_BYTES)
        token: bytes | None = None
        while token is None:
            token = first_proposed(self._store, Note.KEY.value, drawn, _token_of)
        return token

    def post(self, note: Note, document: Any, process: int | None = None) -> None:
        """Leaves a note for process 0, or from it.

        Args:
            process: that it is for, of notes that process 0 leaves for one of the others.
        """
        key = _key(note, self._process if process is None else process)
        self._store.set(key, self._seal.close(key, document))

    def await_from(self, note: Note, processes: Iterable[int] | None = None) -> dict[int, Any]:
        """Returns the notes of processes, once all are there; process 0 calls it.

        Args:
            processes: None: all.

        Raises:
            UserError: one refuses to go on, or gives no sign of life.
        """
        wanted = range(self._processes) if processes is None else processes
        found: dict[int, Any] = {}
        missing = set(wanted)
        signs = _SignsOfLife(self._store, missing, self._patience_s)
        while missing:
            for process in sorted(missing):
                if (document := self._read(note, process)) is not None:
                    found[process] = document
                    self._come.add(process)
                elif (reason := self._read(Note.REFUSAL, process)) is not None:
                    self._come.add(process)
                    raise UserError(f"process {process}: {reason}")
            missing -= found.keys()
            if lost := signs.lost(missing):
                raise UserError(self._absent(lost))
            if missing:
                time.sleep(self._poll_s)
        return found

    def await_first(self, note: Note, *, for_me: bool = False) -> Any:
        """Returns a note of process 0; the others call it.

        Args:
            for_me: whether each process has a note of its own.

        Raises:
            EndedError: there will be none.
        """
        signs = _SignsOfLife(self._store, {0}, self._patience_s)
        while True:
            document = self._read(note, self._process if for_me else 0)
            if document is not None:
                return document
            if (code := self._read(Note.END, 0)) is not None:
                raise EndedError(int(code))
            if signs.lost({0}):
                raise EndedError(ExitCode.FAILURE)
            time.sleep(self._poll_s)

    def await_end(self) -> int:
        """Returns the exit code with which process 0 ends the meeting; the others call it."""
        try:
            return int(self.await_first(Note.END))
        except EndedError as ended:
            return ended.code
        finally:
            with contextlib.suppress(dist.DistError):
                self.post(Note.LEFT, 0)

    def end(self, code: int) -> None:
        """Ends the meeting with an exit code; process 0 calls it, and leaves last."""
        with contextlib.suppress(dist.DistError):
            self.post(Note.END, int(code))
            deadline_s = time.monotonic() + _LEAVING_S
            staying = self._come - {0}
            while staying and time.monotonic() < deadline_s:
                staying -= {one for one in staying if self._read(Note.LEFT, one) is not None}
                time.sleep(_POLL_S)

    def close(self) -> None:
        """Gives no more signs of life."""
        self._over.set()
        self._living.join()

    def _read(self, note: Note, process: int) -> Any:
        key = _key(note, process)
        if not self._store.check([key]):
            return None
        try:
            return self._seal.open(key, self._store.get(key))
        except BrokenSealError:
            return None

    def _absent(self, lost: frozenset[int]) -> str:
        shown = ", ".join(map(str, sorted(lost)[:_SHOWN]))
        more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
        nodes = ", ".join(map(str, sorted(set(map(self._node_of, lost)))))
        return (
            f"no sign of life within {self._patience_s:g} s of process {shown}{more} of "
            f"{self._processes} (node {nodes}): see to it that the launcher starts it, that it "
            f"reaches MASTER_ADDR, and that all have the same {SECRET_VARIABLE}"
        )

    def _give_signs(self) -> None:
        with contextlib.suppress(dist.DistError):  # the store is lost: the others find it, too
            while not self._over.wait(self._patience_s / _SIGNS):
                self._store.add(_sign_key(self._process), 1)


class _SignsOfLife:
    """Who has given one lately, as far as one process looks."""

    def __init__(self, store: Store, processes: Iterable[int], patience_s: float) -> None:
        self._store = store
        self._patience_s = patience_s
        self._looked_s = time.monotonic()
        self._seen = dict.fromkeys(processes, (0, self._looked_s))

    def lost(self, processes: Iterable[int]) -> frozenset[int]:
        """Returns which of some processes have given none for as long as the patience lasts."""
        now_s = time.monotonic()
        if now_s < self._looked_s + self._patience_s / _SIGNS:
            return frozenset()
        self._looked_s = now_s
        for process in processes:
            count = self._store.add(_sign_key(process), 0)
            if count != self._seen[process][0]:
                self._seen[process] = (count, now_s)
        return frozenset(one for one in processes if now_s - self._seen[one][1] > self._patience_s)


def store_at(address: Address, patience: timedelta) -> Store:
    """Returns a connection to the store that a launcher serves.

    Raises:
        UserError: none answers.
    """
    host, port = address
    await_listener(host, port, patience)
    limit = min(patience, _CONNECTING)
    try:
        store: Store = interruptibly(
            lambda: dist.TCPStore(host, port, None, False, limit)  # type: ignore[attr-defined]
        )
    except dist.DistError as error:
        raise UserError(
            f"no store answers at {host}:{port} within {patience.total_seconds():g} s (MASTER_ADDR "
            "and MASTER_PORT, as the launcher sets them)"
        ) from error
    store.set_timeout(patience)
    return store


def _key(note: Note, process: int) -> str:
    return f"{note.value}/{process}"


def _sign_key(process: int) -> str:
    return f"sign/{process}"


def _token_of(text: bytes) -> bytes | None:
    try:
        token = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        return None
    return token if len(token) == _TOKEN_BYTES else None
