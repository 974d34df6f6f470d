# SPDX-License-Identifier: Apache-2.0
"""Wrong accounts of copies, for mutations."""

from __future__ import annotations

from collections.abc import Collection

from megatron_moevement.policy.copies.persistence import Acknowledgements, SlotKey


class CopiesUncounted(Acknowledgements):
    """Counts a slot as complete when nobody is waited for, whether anybody keeps a copy or not."""

    def _has_its_copies(self, slot: SlotKey) -> bool:
        return self.owing[slot] <= self.excused


class DamageOverlooked(Acknowledgements):
    """Does not mind that a slot can't be copied any more."""

    def lost_of(self, damaged: Collection[SlotKey]) -> tuple[SlotKey, ...]:
        """Returns nothing."""
        del damaged
        return ()
