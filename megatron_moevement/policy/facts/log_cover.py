"""Log cover: whether a stage's logs reach from one step to another, on all of its ranks."""

from __future__ import annotations

from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.job.boundary import Direction

_EMPTY: frozenset[int] = frozenset()


class LogCover:
    """What the stages can serve from their logs; each boundary is looked up once."""

    def __init__(self, facts: Facts) -> None:
        """Reads the extents from the facts."""
        self._facts = facts
        self._steps: dict[tuple[int, Direction], frozenset[int]] = {}

    def covers(self, sender: int, direction: Direction, first: int, last: int) -> bool:
        """Returns whether every rank of a stage has the steps [first, last] in its log.

        Args:
            sender: the stage whose ranks sent.
            direction: which way they sent.
            first: first step needed.
            last: last step needed; none are when it lies before the first.
        """
        if last < first:
            return True
        return self._common_steps(sender, direction).issuperset(range(first, last + 1))

    def _common_steps(self, sender: int, direction: Direction) -> frozenset[int]:
        key = (sender, direction)
        if key not in self._steps:
            steps = [
                next((log.steps for log in facts.logs if log.direction is direction), _EMPTY)
                for facts in self._facts.stage(sender)
            ]
            self._steps[key] = steps[0].intersection(*steps[1:]) if steps else _EMPTY
        return self._steps[key]
