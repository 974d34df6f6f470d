# SPDX-License-Identifier: Apache-2.0
"""What is closed at the end of a `with`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Is open until it is closed, or until the end of the `with` that it is given to."""

    @abstractmethod
    def close(self) -> None:
        """Ends what it has begun."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
