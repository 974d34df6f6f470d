# SPDX-License-Identifier: Apache-2.0
"""The model of a step: what a simulated rank does in it, in the order of the training program."""

from __future__ import annotations

from enum import Enum


class Command(Enum):
    """What a rank does in one step of training or of a replay, in this order.

    It may be interrupted between any two commands, and in the middle of all but the last.
    """

    BEGIN = "take what a replay needs from the ledger"
    FORWARD_BACKWARD = "run the pipeline schedule"
    REDUCE_GRADIENTS = "reduce gradients within the stage, tied embeddings included"
    FINALIZE = "finalize gradients; changes of expert_bias are held back"
    GRADIENT_NORM = "reduce gradient norm, found_inf and loss over the model-parallel group"
    PREPARE = "unscale gradients; changes of the loss scalers are held back"
    AWAIT_CAPTURE = "wait for the copy of the former state to land"
    AWAIT_LOG = "wait for the copies of all sent boundary tensors to land"
    AWAIT_ROOM = "wait until a buffer for the next slot can become free"
    BARRIER = "vote and learn that every rank's gradients and logs are complete"
    COMMIT = "enter the section that a restart can't interrupt"


class Section(Enum):
    """What a restart can't interrupt, in this order: it runs to its end, or the state is torn.

    The journal has a step before the live state counts: the target of a plan is what journals say,
    and no rank may be beyond it.
    """

    OPTIMIZERS = "apply the step to every active operator"
    SCHEDULES = "apply what was held back; advance data cursor and step"
    LEDGER = "write the ledger entry"
    COMMITTED = "make the journal say that the step is committed, in one assignment"
    CAPTURE = "begin to copy the new state to the host"
    PUBLISHED = "let the live state count as the new one, in one assignment"


ROLL_FORWARD_SECTION = tuple(each for each in Section if each is not Section.CAPTURE)
"""A commit that a recovery makes up for; the slots of the new state are seen to later."""
