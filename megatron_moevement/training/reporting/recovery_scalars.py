# SPDX-License-Identifier: Apache-2.0
"""A recovery as scalars, at the step that it brought the job back to."""

from __future__ import annotations

from megatron_moevement.policy.outcome.account import RecoveryAccount

PREFIX = "moevement/recovery"
"""Begins the names of all of them."""


def recovery_scalars(account: RecoveryAccount) -> dict[str, float]:
    """Returns what is drawn of a recovery.

    `generation` counts the restarts of a launch; a point of a verdict says that this was it.
    """
    return {
        f"{PREFIX}-time": account.duration_s,
        f"{PREFIX}-replayed-steps": account.replayed_steps,
        f"{PREFIX}-generation": account.generation,
        f"{PREFIX}-verdict/{account.verdict.value}": 1,
    }
