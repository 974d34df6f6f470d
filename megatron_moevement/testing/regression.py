# SPDX-License-Identifier: Apache-2.0
"""Regressions: small worlds in which something went wrong once, kept as JSON."""

from __future__ import annotations

import dataclasses
import json

from megatron_moevement.testing.world.scenario import Scenario


@dataclasses.dataclass(frozen=True)
class Regression:
    """A world and what failed in it.

    Attributes:
        mutation: the wrong decision under which it fails; None where a real one, or the check of
            it, was wrong and has been put right since.
        violates: the invariant that did not hold, or the error that a decision raised.
        scenario: the world. With the real decisions everything in it holds.
    """

    mutation: str | None
    violates: str
    scenario: Scenario

    def to_json(self) -> str:
        """Returns the regression as JSON that `from_json` reads."""
        document = {
            "mutation": self.mutation,
            "violates": self.violates,
            "scenario": self.scenario.to_document(),
        }
        return json.dumps(document, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Regression:
        """Returns the regression that `to_json` wrote."""
        document = json.loads(text)
        scenario = Scenario.of_document(document["scenario"])
        return cls(document["mutation"], document["violates"], scenario)
