# SPDX-License-Identifier: Apache-2.0
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
        self.store.add_notice(topic.value, document)

    def read(self, topic: Topic) -> list[Any]:
        """Returns the notices of a topic, the oldest first; none where the store is lost."""
        return list(self.store.notices(topic.value))

    @cached_property
    def store(self) -> GenerationStore:
        """The generation's keys, over the connection of the boards."""
        return GenerationStore(self.generation, self.connect())
