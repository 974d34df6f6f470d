# SPDX-License-Identifier: Apache-2.0
"""The latest of a job, from its events in whatever order files are read, and how often."""

from __future__ import annotations

from megatron_moevement.policy.accounting.event import EventName, EventRecord


class Latest:
    """The latest event of each kind: of the newest launch, generation and step that has one.

    Attributes:
        launch: name of the newest one, empty where it has none; None before the first.
        time_s: of the newest event of a rank, in seconds since the epoch; None before the first.
        events: by kind, those of ranks alone.
    """

    def __init__(self) -> None:
        """Knows nothing."""
        self.launch: str | None = None
        self.time_s: float | None = None
        self.events: dict[EventName, EventRecord] = {}
        self._keys: dict[EventName, tuple[tuple[float, int], int, float]] = {}
        self._launches_s: dict[str, float] = {}
        self._begun_s: dict[str, float] = {}
        self._newest = (0.0, 0)

    @property
    def generation(self) -> int:
        """That any process of the newest launch is in."""
        return self._newest[1]

    @property
    def step(self) -> int:
        """The newest one that a rank recorded; 0 before the first."""
        steps = self.events.get(EventName.ITERATION)
        return 0 if steps is None else steps.iteration

    def take(self, record: EventRecord, name: str) -> bool:
        """Takes an event of the process with a name; returns whether it is the latest now."""
        if record.event is EventName.LAUNCHED:
            launch = str(record.fields.get("launch") or "")
            self._begun_s[name] = self._launches_s.setdefault(launch, record.time)
            if self._begun_s[name] > self._newest[0]:
                self.launch = launch
        place = (self._begun_s.get(name, 0.0), record.generation)
        self._newest = max(self._newest, place)
        if record.logical_rank < 0:
            return False
        self.time_s = max(record.time, self.time_s or record.time)
        key = (place, record.iteration, record.time)
        is_latest = key >= self._keys.get(record.event, key)
        if is_latest:
            self._keys[record.event], self.events[record.event] = key, record
        return is_latest
