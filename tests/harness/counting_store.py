# SPDX-License-Identifier: Apache-2.0
"""A store in this process that counts who asks it what: many simulated processes, no ranks."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from megatron_moevement.integrations.nvrx.sealed_store import SealedStore
from megatron_moevement.runtime.security.seal import Seal

_TIMEOUT = timedelta(seconds=60)


@dataclasses.dataclass
class Load:
    """What one process has asked for.

    Attributes:
        requests: by their names.
        read: bytes of each answer, by key.
    """

    requests: Counter[str] = dataclasses.field(default_factory=Counter)
    read: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    @property
    def read_bytes(self) -> int:
        """Of all answers."""
        return sum(map(sum, self.read.values()))

    def largest(self, besides: Sequence[str] = ()) -> int:
        """Returns the size of the largest answer, except for keys with some ends."""
        sizes = [max(each) for key, each in self.read.items() if not key.endswith(tuple(besides))]
        return max(sizes, default=0)


class SharedKeys:
    """The keys that all connections reach."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def remove(self, ending: str) -> None:
        """Removes what has keys that end so, as a stranger may do."""
        with self.changed:
            for key in [key for key in self.values if key.endswith(ending)]:
                del self.values[key]


class CountingStore(dist.Store):  # type: ignore[misc, name-defined]
    """A connection of one process."""

    def __init__(self, keys: SharedKeys) -> None:
        super().__init__()
        self.keys = keys
        self.load = Load()

    @property
    def timeout(self) -> timedelta:
        """Of each question."""
        return _TIMEOUT

    def set(self, key: str, value: str | bytes) -> None:
        """Writes a value."""
        with self._ask("set"):
            self._set(key, value)

    def append(self, key: str, value: str | bytes) -> None:
        """Adds to a value."""
        with self._ask("append"):
            self._set(key, self.keys.values.get(key, b"") + _bytes(value))

    def get(self, key: str) -> bytes:
        """Returns a value; waits until it is there, as a real store does."""
        with self._ask("get"):
            self._until_there([key], _TIMEOUT)
            value = self.keys.values[key]
        self.load.read.setdefault(key, []).append(len(value))
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Returns values; waits until all are there."""
        with self._ask("multi_get"):
            self._until_there(keys, _TIMEOUT)
            values = [self.keys.values[key] for key in keys]
        for key, value in zip(keys, values, strict=True):
            self.load.read.setdefault(key, []).append(len(value))
        return values

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys are there."""
        with self._ask("check"):
            return all(key in self.keys.values for key in keys)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Writes a value where another one is, or none; returns what is there then."""
        with self._ask("compare_set"):
            if self.keys.values.get(key, b"") == _bytes(expected):
                self._set(key, desired)
            return self.keys.values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta = _TIMEOUT) -> None:
        """Waits until all keys are there."""
        with self._ask("wait"):
            self._until_there(keys, timeout)

    def _until_there(self, keys: Sequence[str], timeout: timedelta) -> None:
        until_s = time.monotonic() + timeout.total_seconds()
        while not all(key in self.keys.values for key in keys):
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not self.keys.changed.wait(left_s):
                raise dist.DistStoreError("the time is over")

    def _ask(self, name: str) -> threading.Condition:
        self.load.requests[name] += 1
        return self.keys.changed

    def _set(self, key: str, value: str | bytes) -> None:
        self.keys.values[key] = _bytes(value)
        self.keys.changed.notify_all()


class SealedMember(SealedStore, CountingStore):
    """The store of one rank, as its job uses it."""

    def __init__(self, keys: SharedKeys, secret: bytes = b"s" * 64) -> None:
        CountingStore.__init__(self, keys)
        self._begin(Seal(secret), "")

    def wake(self) -> None:
        """Reads how a generation has ended, where that ends its wait."""
        self._end = self._await(self._complete(self.ITERATION_BARRIER), _TIMEOUT)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
