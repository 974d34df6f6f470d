"""The story of a simulated world: who did what, and when."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Line:
    """One thing that happened."""

    time: float
    tick: int
    generation: int
    what: str

    def __str__(self) -> str:
        return f"{self.time:9.2f}  tick {self.tick:5}  generation {self.generation}  {self.what}"


class Story:
    """Collects what is worth telling about a run."""

    def __init__(self) -> None:
        """Begins with nothing."""
        self.lines: list[Line] = []

    def tell(self, time: float, tick: int, generation: int, what: str) -> None:
        """Adds a line."""
        self.lines.append(Line(time, tick, generation, what))

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines))
