"""The commit of a step: which commands it consists of, when it may begin, what an interrupt undoes.

Source: the order comes from Megatron's training step; what is held back until the commit barrier is
what makes an interrupted step repeatable and a finished one applicable later.
"""

from __future__ import annotations

from enum import Enum

from megatron_moevement.policy.persistence import Acknowledgements
from megatron_moevement.policy.ring import SlotRing
from megatron_moevement.policy.schedule import Window


class Command(Enum):
    """What a rank does in one step of training or of a replay, after the former was committed."""

    SAVE_EARLY_STATE = "save what finalize and prepare change before the commit"
    FORWARD_BACKWARD = "run the pipeline schedule"
    REDUCE_GRADIENTS = "reduce gradients within the stage, tied embeddings included"
    GRADIENT_NORM = "reduce gradient norm, found_inf and loss over the model-parallel group"
    FINALIZE = "finalize gradients; expert_bias changes here"
    PREPARE = "unscale gradients; every optimizer's loss scaler changes here"
    AWAIT_CAPTURE = "wait for the copy of the former state to land"
    AWAIT_LOG = "wait for the copies of all sent boundary tensors to land"
    AWAIT_ROOM = "wait until a buffer for the next slot can become free"
    BARRIER = "vote and learn that every rank's gradients and logs are complete"
    COMMIT = "enter the section that a restart can't interrupt"
    CLIP = "clip gradients in place"
    OPTIMIZERS = "apply the step to every active operator"
    SCHEDULES = "advance learning rate, weight decay and data cursor"
    LEDGER = "write the ledger entry"
    COMMITTED = "make the journal say that the step is committed, in one assignment"
    CAPTURE = "begin to copy the new state to the host"
    PUBLISHED = "let the live state count as the new one, in one assignment"


TRAINING_STEP: tuple[Command, ...] = (
    Command.SAVE_EARLY_STATE,
    Command.FORWARD_BACKWARD,
    Command.REDUCE_GRADIENTS,
    Command.FINALIZE,
    Command.GRADIENT_NORM,
    Command.PREPARE,
    Command.AWAIT_CAPTURE,
    Command.AWAIT_LOG,
    Command.AWAIT_ROOM,
    Command.BARRIER,
    Command.COMMIT,
)
"""A step may be interrupted between any two commands, and in the middle of all but the last."""

COMMIT_SECTION: tuple[Command, ...] = (
    Command.CLIP,
    Command.OPTIMIZERS,
    Command.SCHEDULES,
    Command.LEDGER,
    Command.COMMITTED,
    Command.CAPTURE,
    Command.PUBLISHED,
)
"""What a restart can't interrupt: it runs to its end, or the state is torn.

The journal has a step before the live state counts: the target of a plan is what journals say, and
no rank may be beyond it.
"""

ROLL_FORWARD_SECTION: tuple[Command, ...] = (
    Command.CLIP,
    Command.OPTIMIZERS,
    Command.SCHEDULES,
    Command.LEDGER,
    Command.COMMITTED,
    Command.PUBLISHED,
)
"""A commit that a recovery makes up for; the slots of the new state are seen to later."""


class EarlyState(Enum):
    """State that Megatron changes before the commit and that decides later bits."""

    EXPERT_BIAS = "expert_bias"
    DENSE_SCALER = "scaler of the dense optimizer"
    EXPERT_SCALER = "scaler of the expert optimizer"


class Fate(Enum):
    """What becomes of a step that an interrupt cut."""

    APPLIED = "applied"
    """Its gradients are finished and a survivor has committed it: roll forward."""

    REPEATED = "repeated"


def put_back(fate: Fate) -> frozenset[EarlyState]:
    """Returns what an interrupted rank puts back to its value from the start of the step.

    A step that is repeated must find what it found the first time; one that is applied keeps what
    it changed.
    """
    return frozenset(EarlyState) if fate is Fate.REPEATED else frozenset()


class Abort(Enum):
    """Whether the process groups of a rank were aborted."""

    NONE = "none"
    SEEN = "seen"


def may_commit(step: int, agreed_step: int, abort: Abort) -> bool:
    """Returns whether a rank may enter the commit section of a step.

    An aborted collective leaves garbage and lets the stream run on, so the barrier's result counts
    only when no abort came before the section is entered.

    Args:
        step: the step to be committed.
        agreed_step: the step that the barrier's result speaks of.
        abort: as seen after the result was read.
    """
    return agreed_step == step and abort is Abort.NONE


def may_vote(ring: SlotRing, acknowledgements: Acknowledgements) -> bool:
    """Returns whether a rank may come to the barrier, or waits for room for the slot of the step.

    The barrier itself tells that a window is persisted and its predecessor's buffers are free, so
    a full ring waits in front of it, until the rank's own part of a newer window is complete. All
    rings are equally full, hence all ranks wait for the same window.
    """
    if not ring.is_full:
        return True
    complete = acknowledgements.newest_complete()
    return complete is not None and complete.start > ring.oldest


def newest_persisted(former: Window | None, agreed: Window | None) -> Window | None:
    """Returns what a rank believes persisted after a barrier: never less than before.

    A rank that replaces a lost one reports fewer windows until its copies are acknowledged again.
    """
    if former is None or agreed is None:
        return former or agreed
    return max(former, agreed)


def is_current(sent_in: int, generation: int) -> bool:
    """Returns whether a message counts: only those of the receiver's own generation do.

    An interrupted rank may have sent garbage, and an acknowledgement may speak of a copy that a
    restart took away.

    Args:
        sent_in: the generation in which the sender sent it.
        generation: the receiver's.
    """
    return sent_in == generation
