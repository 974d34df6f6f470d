# SPDX-License-Identifier: Apache-2.0
"""What each event means, who records it, what to do about it, and its fields.

`moevement events` prints it. A test compares the fields with those that the code records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum

from megatron_moevement.policy.accounting.event import EventName


class Recorder(Enum):
    """Which processes record an event."""

    PROCESS = "every process"
    SPARE = "a process without a rank"
    LAUNCHER = "the launcher, or the process itself"
    RANKS = "every rank"
    SURVIVORS = "every rank that survived"
    REPLAYING = "every rank that replays"
    FIRST_RANK = "rank 0"
    ONE_RANK = "the rank that does or finds it"


@dataclasses.dataclass(frozen=True)
class EventKind:
    """One kind of event.

    Attributes:
        action: for the person on call; `` `name` `` is a field of the event, another
            event, or a command.
        fields: what each field is, by its name. `_s` are seconds, `_bytes` bytes; a time is in
            seconds since the epoch.
    """

    recorder: Recorder
    meaning: str
    action: str
    fields: Mapping[str, str]


COMMON_FIELDS = {
    "time": "when it was recorded, in seconds since the epoch, by the clock of the machine",
    "logical_rank": "the place of the process in the job; -1 without one",
    "pid": "of the process on its machine",
    "generation": "restarts in place before it, of this launch",
    "iteration": "the step that it is about, or the newest committed one",
    "event": "its name",
}
"""What every event has."""

_NOTHING = "nothing"
_WINDOW = {
    "start": "first step of the window",
    "size": "W of the window",
    "lag": "steps between its last one and the newest committed one",
}
_DURATION = "how long it took"
_WAITED = "how long training waited for it, since it was begun"
_WRITTEN = "how long this rank wrote beside training, with `--async-save`"

EVENT_KINDS: Mapping[EventName, EventKind] = {
    EventName.LAUNCHED: EventKind(
        Recorder.PROCESS,
        "a process runs, before it meets any other",
        _NOTHING,
        {
            "schema": "version of the events",
            "launch": "name of the launch, of MOEVEMENT_LAUNCH; null without one",
            "process": "its number in the job",
            "processes": "of the job, spares included",
            "host": "name of its machine",
            "started_s": "when it was started; null where the system does not have it",
            "slurm_job": "SLURM_JOB_ID; null without Slurm",
        },
    ),
    EventName.SPARE: EventKind(
        Recorder.SPARE, "it waits for a place in a generation", _NOTHING, {}
    ),
    EventName.PROCESS_START: EventKind(
        Recorder.RANKS,
        "it has a place for the first time",
        _NOTHING,
        {
            "entered_s": "when its generation began for it",
            "joined_s": "when it had met the others",
            "run_id": "name of the run in host memory; null without protection",
        },
    ),
    EventName.PROCESS_END: EventKind(
        Recorder.LAUNCHER,
        "a process has ended; it records its own end too, with an exception as well, but not where "
        "a signal kills it, without `launch`, `process`, `host` and `started_s`",
        "nothing where `code` is 0; else the runbook has what to do for each exit code",
        {
            "code": "its exit code, negative for a signal",
            "child": "its process number on its machine; null where the launcher has none",
            "launch": "name of the launch",
            "process": "its number in the job",
            "host": "name of the launcher's machine",
            "started_s": "when it was started",
        },
    ),
    EventName.PHASE: EventKind(
        Recorder.RANKS,
        "the process begins to do something else",
        "nothing; a process that hangs in one is killed after --inprocess-hard-timeout",
        {
            "phase": "planning, loading, settling, restoring, replaying, standing by, rejoining, "
            "training, paused (evaluates or saves) or ending"
        },
    ),
    EventName.ITERATION: EventKind(
        Recorder.RANKS,
        "committed steps, up to `iteration`; rank 0 adds from `loss` on",
        "nothing; where `stall_s` is much of `duration_s`, copies are too slow: `moevement check`",
        {
            "steps": "how many; durations, waits and bytes are sums over them",
            "duration_s": "of the steps themselves",
            "began_s": "when the first one began",
            "ended_s": "when the last one ended",
            "stall_s": "of the duration, waits for what protects the steps",
            "captured_bytes": "copied to the host",
            "metadata_bytes": "scalars beside them, as JSON",
            "replicated_bytes": "acknowledged by other processes",
            "log_bytes": "added to the upstream log",
            "host_bytes": "host memory in use by snapshots and logs, at the end",
            "copy_s": "of slots to the host",
            "hash_s": "checksums of slots",
            "send_s": "to each process, by its number",
            "log_s": "what crosses stage boundaries, copied and hashed",
            "await_copy_s": "training waited for a slot's copy",
            "await_room_s": "training waited for acknowledgements, with a full ring",
            "await_log_s": "training waited for the log",
            "loss": "of the last step",
            "losses": "of each step, where there are several",
            "learning_rate": "of the last step; null where there is none",
            "loss_scale": "of the last step",
            "grad_norm": "of the last step; null where there is none",
            "skipped": "steps whose gradients overflowed",
        },
    ),
    EventName.EVALUATION: EventKind(
        Recorder.RANKS,
        "an evaluation",
        _NOTHING,
        {
            "split": "validation or test",
            "loss": "its loss",
            "is_final": "whether it follows the training",
            "duration_s": _DURATION,
        },
    ),
    EventName.WINDOW_PERSISTED: EventKind(
        Recorder.FIRST_RANK,
        "every slot of a window has its copies: a recovery may begin with it",
        "nothing; where none comes any more, the log has why copies fail",
        {**_WINDOW, "copies": "the fewest of one of its slots, besides that of its own process"},
    ),
    EventName.PROTECTION: EventKind(
        Recorder.FIRST_RANK,
        "the level of protection has changed",
        "nothing where `level` is full; else replace lost hosts, or start more spares",
        {
            "level": "full, reduced or no copies",
            "copies": "the fewest of a slot of the newest persisted window",
            "wanted": "copies that were asked for",
            "spares": "processes that wait; null where none could take a place",
            "costs": "what a single loss costs beyond the replay of its own stage",
            **_WINDOW,
        },
    ),
    EventName.TIER_WRITTEN: EventKind(
        Recorder.FIRST_RANK,
        "a persisted window is complete in --moevement-tier-dir",
        _NOTHING,
        {
            "start": _WINDOW["start"],
            "size": _WINDOW["size"],
            "tier_bytes": "written by all ranks",
            "duration_s": "since the window was persisted",
        },
    ),
    EventName.FAULT_INJECTED: EventKind(
        Recorder.ONE_RANK,
        "a fault on purpose strikes this process",
        "nothing: --moevement-faults asked for it",
        {
            "kind": "kill, stop, exception, exit or segfault",
            "place": "in the step; null of one that a time decides",
            "at_s": "seconds after the beginning of the job; null of one that a place decides",
        },
    ),
    EventName.FAULT_DETECTED: EventKind(
        Recorder.SURVIVORS,
        "a survivor has joined the others again, after processes were lost or training failed",
        "look at the hosts in `losses`; take out one that is there again and again",
        {
            "noticed_s": "when this process was interrupted",
            "phase": "what it did then; null before any",
            "losses": "lost processes: `process`, `rank` or null, `host`, `reason`, `end`",
            "last_step_s": "when its newest step ended; null before any",
            "teardown_s": "from the interruption to its new generation",
            "rendezvous_s": "until it had met the others",
            "builds": "times that it has built model and optimizer",
            "threads": "of the process",
            "descriptors": "open files of the process",
            "stuck_groups": "process groups of former generations that do not end",
        },
    ),
    EventName.PLAN: EventKind(
        Recorder.RANKS,
        "the plan of a recovery, the same on all ranks: another fault may strike some of them "
        "before they record it",
        "nothing; where `lost_steps` is not 0, `reason` has the cause",
        {
            "verdict": "RESUME, COPIED, LOCALIZED, GLOBAL or ROLLBACK",
            "reason": "of the verdict, in a line",
            "target": "step after which training goes on",
            "scope": "pipeline stages that replay",
            "window": "first step of the window that is replayed from; null without one",
            "replayed_steps": "steps that are replayed",
            "lost_steps": "committed steps that are trained again",
            "roll_forward": "ranks that commit one more step with the gradients that they have",
            "copies": "ranks whose state is copied from a living rank",
            "digest": "of the plan",
        },
    ),
    EventName.REPLAY: EventKind(
        Recorder.REPLAYING,
        "a step was replayed",
        "nothing; where `replay_verified` is false, as for `replay_differed`",
        {
            "duration_s": _DURATION,
            "active": "operators with their whole state",
            "frozen": "operators that are only computed with",
            "weight_gradients": "what became of those of frozen operators",
            "replay_verified": "whether all that was compared is equal",
            "boundaries_equal": "tensors sent again to bystanders that equal the first ones",
            "boundaries_unequal": "that do not",
            "boundaries_unknown": "that nothing is left to compare with",
        },
    ),
    EventName.AUDIT: EventKind(
        Recorder.RANKS,
        "ranks that hold the same state have compared it (--moevement-audit-interval)",
        "nothing without `differences`; else take out the devices of the odd ranks, and go back to "
        "a checkpoint before that step",
        {
            "operators": "that were compared",
            "differences": "operators that differ: `operator`, `odd` ranks, all `ranks` with it",
        },
    ),
    EventName.REPLAY_DIFFERED: EventKind(
        Recorder.RANKS,
        "a replay ended with other bits than the first time",
        "what `consequence` asks for; test the devices of `ranks`, if it is repeated",
        {
            "ranks": "on which it did",
            "consequence": "what follows from it",
            "proof": "what was compared, in words",
        },
    ),
    EventName.RECOVERED: EventKind(
        Recorder.RANKS,
        "a recovery is over: training goes on",
        "nothing more than for its `fault_detected`",
        {
            "verdict": "of its plan",
            "scope": "pipeline stages that replayed",
            "guarantee": "EXACT or CONSISTENT",
            "replayed_steps": "by this rank",
            "replay_verified": "whether all that was compared is equal; null without a replay",
            "replay_proof": "what was compared, by kind: equal and unequal; null without a replay",
            "forward_passes": "of micro-batches, of this rank",
            "backward_passes": "of micro-batches, of this rank",
            "duration_s": "from the facts to the first step, parts before them excluded",
            "breakdown_s": "its parts by name, as in the account",
            "rejoined_s": "when all ranks were ready",
            "hashed_bytes": "whose checksums this rank verified",
            "owed_copies": "copies of slots that are still to be made",
            "moved_copies": "copies that have found another process",
        },
    ),
    EventName.CHECKPOINT_BEGUN: EventKind(
        Recorder.RANKS,
        "a durable checkpoint is being written beside training (`--async-save`)",
        _NOTHING,
        {"duration_s": "how long training took to begin it"},
    ),
    EventName.CHECKPOINT_SAVED: EventKind(
        Recorder.RANKS,
        "a durable checkpoint is there",
        _NOTHING,
        {"duration_s": _WAITED, "written_s": _WRITTEN},
    ),
    EventName.CHECKPOINT_FAILED: EventKind(
        Recorder.RANKS,
        "a durable checkpoint could not be written; training goes on",
        "see to room and rights of --save before the next one",
        {"duration_s": _WAITED, "written_s": _WRITTEN, "reason": "of the failure"},
    ),
    EventName.SCHEDULE: EventKind(
        Recorder.RANKS,
        "all ranks have agreed on another schedule of windows",
        _NOTHING,
        {
            "version": "its number",
            "first_step": "from which it is in force",
            "window": "its W",
            "digest": "of the schedule",
        },
    ),
    EventName.WINDOW_CHOSEN: EventKind(
        Recorder.FIRST_RANK,
        "another W is proposed (--moevement-window auto)",
        _NOTHING,
        {
            "former": "W until then",
            "window": "W that is proposed",
            "used": "slots of it that are filled; null: all",
            "reason": "of the choice",
            "budget_bytes": "that a slot may have",
            "former_slot_bytes": "of the largest slot until then",
            "slot_bytes": "of the largest slot from then on",
            "to_host_bytes_per_s": "measured, of the slowest rank; null: nothing was captured",
            "to_holder_bytes_per_s": "measured, to the slowest holder; null: there is none",
            "iteration_s": "measured, without stalls",
            "stall_s": "measured, of an iteration on average",
            "contention_s": "measured, of an iteration: what threads beside training take from it",
            "delay_s": "measured, of an iteration: waits of passes for a core; null: not known",
        },
    ),
    EventName.POPULARITY: EventKind(
        Recorder.FIRST_RANK,
        "how much experts were used in a window",
        _NOTHING,
        {
            "ordering": "by what they are ordered",
            "total": "of all scores",
            "digest": "of the scores",
            "asks_for_order": "whether a new order is asked for: then it has the next two",
            "experts": "of each layer",
            "scores": "of each expert, layer after layer",
        },
    ),
    EventName.LOSSES: EventKind(
        Recorder.FIRST_RANK,
        "losses of the newest steps again: before a recovery, no process may have recorded them",
        _NOTHING,
        {"losses": "of the steps up to `iteration`; null where none is there"},
    ),
    EventName.HOLDERS_CHANGED: EventKind(
        Recorder.ONE_RANK,
        "at the end of a window other processes keep the copies of this rank's slots than before: "
        "one of those did not answer",
        "look at the host and the network of who is no holder any more, if it lasts",
        {"holders": "the processes that keep them now", "former": "those that kept them before"},
    ),
    EventName.SLOT_DAMAGED: EventKind(
        Recorder.ONE_RANK,
        "a slot has changed in this process's memory; no recovery uses it",
        "nothing, once: a copy replaces it; test the machine's memory, if it is repeated",
        {"owner": "the rank whose slot it is", "parts": "that have changed"},
    ),
    EventName.SLOW_RANK: EventKind(
        Recorder.FIRST_RANK,
        "a rank computes longer than the others",
        "look at clocks, temperature and neighbours of the device of `rank`",
        {
            "rank": "which one",
            "own_s": "a step takes it",
            "median_s": "a step takes the median rank",
            "steps": "in a row",
        },
    ),
}
