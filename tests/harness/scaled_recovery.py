# SPDX-License-Identifier: Apache-2.0
"""What one rank of a large job does in a recovery before anything moves, step by step.

These are the functions that a job calls, over what a job of that size would tell: a node of eight
is lost, and spares take its ranks. Only the collectives have nobody at their other end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import cached_property
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_moevement.integrations.megatron.group_keys import gathered_keys
from megatron_moevement.policy.copies.placement import HeldCopies, Host
from megatron_moevement.policy.facts.facts import Facts, ProcessFacts
from megatron_moevement.policy.facts.facts_document import dump_process
from megatron_moevement.policy.job.guarantee import Computation, Computations, DeviceKind, Kernels
from megatron_moevement.policy.job.model_shape import Capture, ModelShape, inventory_of
from megatron_moevement.policy.job.ranks import Layout, LogicalRank
from megatron_moevement.policy.job.segments import Ends
from megatron_moevement.policy.outcome.futility import Futility
from megatron_moevement.policy.recovery.histories import of_newest_history
from megatron_moevement.policy.recovery.plan import Plan, Verdict
from megatron_moevement.policy.recovery.recovery_planner import has_no_use_of_memory, plan_start
from megatron_moevement.runtime.coordination.agreement import (
    broadcast_json,
    gather_distinct,
    gather_read_together,
    gather_unlike,
)
from megatron_moevement.runtime.slots.store_identity import RunIdentity
from megatron_moevement.runtime.transport.interface import own_address, own_network
from megatron_moevement.settings.fault_tolerance import FaultTolerance
from megatron_moevement.strategies.moevement.agreed_guarantee import agree_on_guarantee, judge
from megatron_moevement.strategies.moevement.carried_state import CarriedState
from megatron_moevement.strategies.moevement.introduction import introduce
from megatron_moevement.strategies.moevement.protection.first_captures import (
    captures_for,
    first_captures,
)
from megatron_moevement.strategies.moevement.protection.job_plan import (
    Found,
    PlannedJob,
    check_alike,
    plan_of,
    shared_plan,
)
from megatron_moevement.strategies.moevement.protection.left_state import gather_facts
from megatron_moevement.strategies.moevement.protection.members import Member
from megatron_moevement.strategies.moevement.protection.placement_of_holders import (
    add_held,
    keep_placement,
)
from megatron_moevement.strategies.moevement.protection.spares import Spare
from megatron_moevement.strategies.moevement.recovery.left_ledger import LeftLedger
from megatron_moevement.training.knowledge import Known, share
from tests.harness.job_facts import Job, without_processes
from tests.harness.one_of_many import OneOfMany, Values

CPU = torch.device("cpu")
PER_NODE = 8
WINDOW = 6
STEP = 6 * WINDOW - 2
LOSSES = 2000
TRAIN_ITERS = 10_000
SHAPE = ModelShape(
    num_layers=32,
    hidden_size=2048,
    ffn_hidden_size=0,
    vocab_size=102_400,
    num_experts=256,
    moe_ffn_hidden_size=1408,
)
KEYS = [[None, False], [[["wd_mult", 0.0]], False], [None, True]]
"""Of the parameter groups that ranks make, as JSON."""


class Kind(Enum):
    """Whose work it is."""

    SURVIVOR = "survivor"
    NEWCOMER = "newcomer"


def layout_of(ranks: int) -> Layout:
    """Returns PP 8, experts over up to 64 ranks, and replicas of them.

    Raises:
        ValueError: such a job has another number of ranks.
    """
    layout = Layout(pp=8, ep=min(ranks // 8, 64), dp=max(ranks // 512, 1))
    if layout.num_ranks != ranks:
        raise ValueError(f"{ranks} ranks: must be 8 times a power of two")
    return layout


@dataclasses.dataclass(frozen=True)
class Told:
    """What all ranks tell in one recovery; the second node of the job was lost."""

    ranks: int

    @cached_property
    def facts(self) -> Facts:
        """Of all processes, by rank, the spares at the end."""
        layout = layout_of(self.ranks)
        job = Job(
            layout,
            step=STEP,
            window=WINDOW,
            spares=max(2 * PER_NODE, self.ranks // 128),
            processes_per_domain=PER_NODE,
        )
        facts = without_processes(job.facts(), range(PER_NODE, 2 * PER_NODE))
        order = {rank: number for number, rank in enumerate(layout.ranks)}
        found = sorted(
            facts.processes,
            key=lambda one: len(order) if one.rank is None else order[one.rank],
        )
        return dataclasses.replace(facts, processes=tuple(found))

    @property
    def ranked(self) -> tuple[ProcessFacts, ...]:
        """Of the processes that have a rank."""
        return self.facts.processes[: self.ranks]

    @property
    def spares(self) -> tuple[ProcessFacts, ...]:
        """Of those that have none."""
        return self.facts.processes[self.ranks :]

    @cached_property
    def members(self) -> tuple[Member, ...]:
        """What ranks hold."""
        operators = inventory_of(SHAPE, self.facts.layout, Capture.SHARD).by_rank
        found = tuple(
            Spare(one.process, one.domain, ("10.1.0.1", 4000 + one.process), "far", _held(one))
            for one in self.spares
        )
        return tuple(
            Member.of(
                Host(one.process, one.domain, one.rank),
                operators[_rank(one)],
                4096,
                1 << 24,
                () if number else found,
            )
            for number, one in enumerate(self.ranked)
        )

    @cached_property
    def computations(self) -> Computations:
        """What ranks compute with."""
        parts = {"device": "GPU of some model", "driver": "555.42", "torch": "2.13", "nccl": "2.29"}
        variables = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
        found = [
            Computation(
                *(DeviceKind.CUDA, Kernels.DETERMINISTIC, 1),
                parts | {"GPU of its machine": f"0:{number:x}:0"},
                variables,
            )
            for number in range(PER_NODE)
        ]
        by_rank = tuple(found[number % PER_NODE] for number in range(self.ranks))
        return Computations(by_rank, tuple(one.domain for one in self.ranked))

    def is_new(self, number: int) -> bool:
        """Returns whether a rank's process has come in new."""
        return PER_NODE <= number < 2 * PER_NODE


def _rank(facts: ProcessFacts) -> LogicalRank:
    assert facts.rank is not None
    return facts.rank


def _held(facts: ProcessFacts) -> dict[LogicalRank, int]:
    return {each.owner: STEP for each in facts.holdings if each.owner != facts.rank}


class ScaledRecovery:
    """The work of one rank; what comes of a part is what the next one begins with."""

    def __init__(self, ranks: int, kind: Kind) -> None:
        """Makes what the others tell.

        Args:
            ranks: of the job.
        """
        self.told = Told(ranks)
        self.number = PER_NODE if kind is Kind.NEWCOMER else ranks - 1
        self._is_new = kind is Kind.NEWCOMER
        told, facts = self.told, self.told.facts
        self._own = told.ranked[self.number]
        self._settings = FaultTolerance(moevement_window=WINDOW)
        job = PlannedJob(self._settings, told.members, facts.ends, TRAIN_ITERS)
        self._former = plan_of(job)
        self._found = Found.of(job, self._former).document()
        origin = told.computations
        self._carried = CarriedState()
        if not self._is_new:
            agree_on_guarantee(origin, [None], self._carried)
        plan = plan_start(facts)
        assert plan is not None
        assert plan.verdict is Verdict.LOCALIZED
        self._scripts = dict(self._script(plan))

    def _script(self, plan: Plan) -> Iterator[tuple[str, tuple[Values, ...]]]:
        """Yields what the others do in each part."""
        told, former = self.told, self._former
        numbers = range(told.ranks)
        known = [not told.is_new(number) for number in numbers]
        run = RunIdentity({"seed": "1"}, {"window": str(WINDOW)})
        yield (
            "keys",
            (
                Values([["f" * 64, 3 * has, [STEP, told.ranks, 0], STEP] for has in known]),
                Values([[run.document(), [KEYS]]]),
            ),
        )
        interface = self._settings.moevement_replication_interface
        receiver = {"network": own_network(), "address": own_address(interface)}
        said = [
            [
                member.document(),
                {**own.document(), "host": member.host.domain},
                None,
                {"process": member.host.process, **receiver},
                [None, "0" * 64],
                former.basis if has else None,
            ]
            for member, own, has in zip(told.members, told.computations.by_rank, known, strict=True)
        ]
        yield "introduction", (Values([[one, None] for one in said]),)
        lacking: list[str] = []
        digests = ["a" * 64 if has else "b" * 64 for has in known]
        agreed = (Values([self._found]), Values(digests), Values([lacking]), Values([None]))
        yield "plan of the job", agreed
        held = [
            [one.process, [[str(rank), step] for rank, step in _held(one).items()]]
            for one in told.ranked
        ]
        yield "placement and memory", (Values([[one, None] for one in held]),)
        published = [[dump_process(one)] for one in told.ranked]
        published[0] += [dump_process(one) for one in told.spares]
        yield "facts", (Values(published),)
        yield "plan of the recovery", ()
        losses = {str(step): "3f800000" for step in range(1, LOSSES)}
        entries = {str(step): "e" * 2000 for step in range(STEP - WINDOW, STEP + 1)}
        captures = [
            [
                {
                    str(owner): {str(step): "0" * 16 for step in range(STEP - WINDOW, STEP)}
                    for owner in {each.owner for each in one.holdings}
                    if owner.pp in plan.start_of
                }
            ]
            for one in told.ranked
        ]
        yield (
            "ledger and captures",
            (
                Values([[one, None] for one in captures]),
                Values([{"entries": entries, "losses": losses}]),
            ),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The parts."""
        return tuple(self._scripts)

    def forget(self) -> None:
        """Forgets what came of the parts."""
        for name in ("_introduced", "_job_plan", "_facts", "_plan_made"):
            vars(self).pop(name, None)

    def parts(self, group: OneOfMany) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yields the parts in their order; call each before the next one is asked for.

        Args:
            group: of this rank.
        """
        acts: Mapping[str, Callable[[], Any]] = {
            "keys": self._keys,
            "introduction": self._introduce,
            "plan of the job": self._plan_job,
            "placement and memory": self._place,
            "facts": self._gather_facts,
            "plan of the recovery": self._plan,
            "ledger and captures": self._left,
        }
        for name, act in acts.items():
            group.script(*self._scripts[name])
            yield name, act

    def _keys(self) -> None:
        identity = None if self._is_new else RunIdentity({}, {})
        own = Known(identity, None if self._is_new else [KEYS], Futility(STEP, self.told.ranks))
        known = share(own, "f" * 64, STEP, self.told.ranks, CPU)
        if self._is_new:
            with gathered_keys(known.keys) as keys:
                answers = [None] * self.told.ranks
                dist.all_gather_object(answers, [])
            assert keys == [KEYS]

    def _introduce(self) -> None:
        told, own = self.told, self._own
        objects: Any = SimpleNamespace(
            optimizer=SimpleNamespace(is_state_whole=False),
            process=own.process,
            replication_key=None,
            computation=told.computations.by_rank[self.number],
            host=told.computations.hosts[self.number],
            device=CPU,
        )
        live: Any = None
        basis = None if self._is_new else self._former.basis
        member = told.members[self.number]
        self._introduced = introduce(self._settings, objects, live, member, basis)

    def _plan_job(self) -> None:
        told, carried = self._introduced, self._carried
        job = PlannedJob(self._settings, told.members, Ends.INDEPENDENT, TRAIN_ITERS)
        former = None if self._is_new else self._former
        found = shared_plan(job, former, told.bases, CPU)
        self._job_plan = plan_of(job, 1, former, found)
        check_alike(gather_unlike(self._job_plan.schedule.digest, CPU))
        judged = gather_distinct(judge(told.computations, carried), CPU)
        agree_on_guarantee(told.computations, judged, carried)

    def _place(self) -> None:
        held = HeldCopies()
        gather_read_together(
            lambda: self._scripts_own("placement and memory"),
            CPU,
            lambda _, told: add_held(held, told),
        )
        self._job_plan = keep_placement(self._job_plan, held)
        host = self._introduced.members[self.number].host
        assert self._job_plan.account_of(host).total_bytes
        assert self._job_plan.kept_for(host.process)
        self._job_plan.check_limit(*(one.process for one in self._job_plan.hosts))
        del self._introduced  # as a job does: it is no part of a plan

    def _scripts_own(self, name: str) -> Any:
        return self._scripts[name][0].values[self.number][0]

    def _gather_facts(self) -> None:
        facts = self.told.facts
        layout = dataclasses.replace(facts.layout)  # with nothing derived from it before
        own = dataclasses.replace(facts, layout=layout, processes=(self._own,))
        self._facts = gather_facts(own, CPU)

    def _plan(self) -> None:
        newest = of_newest_history(self._facts)
        plan = plan_start(newest)
        assert plan is not None
        assert not has_no_use_of_memory(plan)
        assert not gather_unlike(plan.digest, CPU)
        self._plan_made = plan
        rank = _rank(self._own)
        plan.for_rank(rank)
        assert newest.by_rank[rank].process == self._own.process

    def _left(self) -> None:
        rank = _rank(self._own)
        told = gather_read_together(
            lambda: self._scripts_own("ledger and captures"),
            CPU,
            lambda _, told: captures_for(rank, told),
        )
        ledger = LeftLedger.of_document(broadcast_json(None, 0, CPU))
        assert len(ledger.losses) == LOSSES - 1
        first_captures(rank, self._plan_made, chain.from_iterable(told))
