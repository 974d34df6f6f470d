"""Notice boards in the control store: a key for each topic of a generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

from megatron_moevement.integrations.nvrx.control_store import ControlStore, GenerationStore
from megatron_moevement.runtime.coordination.notice_board import Topic


@dataclasses.dataclass(frozen=True)
class StoredBoard:
    """The board of one generation; the training thread uses it.

    Attributes:
        connect: returns the connection of all boards, made when it is needed. It is one of their
            own: NVRx's threads wait on theirs, and whoever asks meanwhile waits with them.
    """

    connect: Callable[[], ControlStore]
    generation: int

    def post(self, topic: Topic, document: Any) -> None:
        """Adds a notice; nothing happens where the control store is lost, which ends all."""
        self._store.add_notice(topic.value, document)

    def read(self, topic: Topic) -> list[Any]:
        """Returns the notices of a topic, the oldest first; none where the store is lost."""
        return list(self._store.notices(topic.value))

    def is_interrupted(self) -> bool:
        """Returns whether a restart of the generation was asked for; that is noted before an abort.

        Raises:
            DistNetworkError: the control store is lost.
        """
        return bool(self._store.check([GenerationStore.ANY_RANK_INTERRUPTED]))

    @cached_property
    def _store(self) -> GenerationStore:
        return GenerationStore(self.generation, self.connect())
