"""Notice boards in the control store: a key for each topic of a generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from megatron_moevement.integrations.nvrx.stores import ControlStore, GenerationStore
from megatron_moevement.runtime.coordination.notice_board import Topic


class StoredNotices:
    """The boards of all generations; the training thread uses them.

    They have a connection of their own, made when it is needed: NVRx's threads wait on theirs, and
    whoever asks meanwhile waits with them.
    """

    def __init__(self, connect: Callable[[], ControlStore]) -> None:
        self._connect = connect
        self._store: ControlStore | None = None

    def of(self, generation: int) -> StoredBoard:
        """Returns the board of a generation."""
        return StoredBoard(self, generation)

    def store_of(self, generation: int) -> GenerationStore:
        """Returns the keys of a generation."""
        if self._store is None:
            self._store = self._connect()
        return GenerationStore(generation, self._store)


@dataclasses.dataclass(frozen=True)
class StoredBoard:
    """The board of one generation."""

    notices: StoredNotices
    generation: int

    def post(self, topic: Topic, document: Any) -> None:
        """Adds a notice; nothing happens where the control store is lost, which ends all."""
        self.notices.store_of(self.generation).add_notice(topic.value, document)

    def read(self, topic: Topic) -> list[Any]:
        """Returns the notices of a topic, the oldest first; none where the store is lost."""
        return self.notices.store_of(self.generation).notices(topic.value)
