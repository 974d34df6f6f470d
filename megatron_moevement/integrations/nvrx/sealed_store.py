# SPDX-License-Identifier: Apache-2.0
"""What NVRx keeps in its store, as sealed JSON documents.

NVRx (0.4.1) pickles what processes write there, and anybody who reaches the store may write. Here
nothing is unpickled, and what carries no seal of this job counts as not written: a line says so,
and who waits for it goes on waiting, for as long as its limit allows.

A store of torch can be emptied by whoever reaches it, too. So processes that wait write again what
they have written, where it is gone.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from nvidia_resiliency_ext.inprocess.attribution import InterruptionRecord
from nvidia_resiliency_ext.inprocess.state import State
from nvidia_resiliency_ext.inprocess.store import BarrierOverflow, BarrierTimeout, StoreMixin

from megatron_moevement.integrations.nvrx.heartbeats import Heartbeats
from megatron_moevement.integrations.nvrx.reasons import in_short
from megatron_moevement.integrations.nvrx.sealed_documents import NONCE_BYTES, SealedDocuments
from megatron_moevement.policy.number_runs import numbers_of, runs_of
from megatron_moevement.policy.outcome.why_ended import reason_of_each
from megatron_moevement.policy.watching.short_lists import by_list, list_of, slice_s
from megatron_moevement.runtime.coordination.attendance import Attendance, Looks, left_by, list_key
from megatron_moevement.runtime.coordination.elected_reader import READING_S, ElectedReader
from megatron_moevement.runtime.security.seal import Seal

_SLICE_S = 0.25
_LOOK_S = 1.0  # so often a process that waits looks whether its arrival is still noted
_FREE_LOOKS = 512  # so many look so often; more share the looks that these would take
_LEAST_LOOKS = 4  # that each takes before its time is over
_MOST_CHARACTERS = 2**19  # of all processes in one place; beyond that each reads all places
_HOST = "moevement_host_{rank}"


class ForeignValueError(dist.DistStoreError):
    """For a whole time limit, the store held what no process of this job wrote."""


class SealedStore(SealedDocuments):
    """Overrides everything that NVRx reads or writes; mixed into a store of torch."""

    def _begin(self, seal: Seal, scope: str) -> None:
        super()._begin(seal, scope)
        self._heartbeats = Heartbeats()
        self._end: Any = None

    def set_initial_rank(self, rank: int, initial_rank: int) -> None:
        """Notes the number of the process that has a rank."""
        self._put(self.INITIAL_RANK.format(rank=rank), initial_rank)

    def get_initial_ranks(self, ranks: Iterable[int]) -> list[int]:
        """Returns the numbers of processes that have written theirs; waits for none.

        Upstream (0.4.1 to 0.7) waits for those that were lost before, in native code: meanwhile the
        monitor that asks can't use its connection, and watches nobody. It also returns bytes.
        """
        there = [key for rank in ranks if self.check([key := self.INITIAL_RANK.format(rank=rank)])]
        deadline_s = time.monotonic() + self.timeout.total_seconds()
        return [int(number) for number in self._read(there, deadline_s)]

    def send_heartbeat(self, rank: int) -> None:
        """Notes that a process lives."""
        self._put(self.HEARTBEAT.format(rank=rank), self._heartbeats.give())

    def get_heartbeat(self, rank: int) -> int:
        """Looks for a sign of life; returns how many looks in a row have found nothing new."""
        return self.get_heartbeats([rank])[0]

    def get_all_heartbeats(self, world_size: int) -> list[int]:
        """Looks for signs of life of all processes."""
        return self.get_heartbeats(range(world_size))

    def get_heartbeats(self, ranks: Iterable[int]) -> list[int]:
        """Looks for signs of life of some processes; waits for none."""
        found = []
        for rank in ranks:
            key = self.HEARTBEAT.format(rank=rank)
            sign = self._opened(key, self.get(key)) if self.check([key]) else None
            found.append(self._heartbeats.look(rank, sign))
        return found

    def send_state(self, state: Any, rank: int) -> None:
        """Notes that a process is there, before places are assigned."""
        self._put(self.STATE.format(rank=rank), state.world_size)

    def get_states(self, ranks: Iterable[int]) -> list[Any]:
        """Returns the states of processes that have just started; waits for them."""
        ranks = list(ranks)
        sizes = self._of_all(self.STATE, ranks)
        return [
            State(rank=rank, world_size=int(size)) for rank, size in zip(ranks, sizes, strict=True)
        ]

    def send_key(self, key: Sequence[str], rank: int) -> None:
        """Notes what groups a process."""
        self._put(self.KEY.format(rank=rank), list(key))

    def get_keys(self, ranks: Iterable[int]) -> list[list[str]]:
        """Returns what groups processes."""
        return [[str(one) for one in key] for key in self._of_all(self.KEY, ranks)]

    def send_host(self, host: str, rank: int) -> None:
        """Notes the machine of a process, before places are assigned."""
        self._put(_HOST.format(rank=rank), host)

    def get_hosts(self, ranks: Iterable[int]) -> list[str]:
        """Returns the machines of processes that have just started; waits for them."""
        return [str(host) for host in self._of_all(_HOST, ranks)]

    def record_interrupted(self, records: Iterable[InterruptionRecord] | None = None) -> None:
        """Interrupts all processes, with reasons unless the list of them is closed."""
        if records is not None and not self._is_put(self.INTERRUPTION_RECORDS_LOCK):
            for record in records:
                self.append(*self._line(self.INTERRUPTION_RECORDS, str(record)))
        self._put(self.ANY_RANK_INTERRUPTED, True)

    def lock_interruption_records(self) -> None:
        """Closes the list of reasons."""
        self._put(self.INTERRUPTION_RECORDS_LOCK, True)

    def get_interruption_records(self) -> list[InterruptionRecord]:
        """Returns no reasons, which each process asks for when it is interrupted.

        NVRx puts them into the message of an exception that it catches itself. They grow with the
        processes, so one of them reads them, at the end of the generation.
        """
        return []

    def get_reasons(self) -> dict[int, str]:
        """Returns the name of the reason of each rank that has one, as all find it that met."""
        return reason_of_each(self._end_found()["reasons"])

    def wait_for_interrupted(self, timeout: timedelta) -> None:
        """Waits until any process is interrupted.

        Raises:
            DistStoreError: the time is over.
        """
        self._await(self.ANY_RANK_INTERRUPTED, timeout)

    def record_completed(self) -> None:
        """Notes that a process has done all its work."""
        self._put(self.ANY_RANK_COMPLETED, True)

    def wait_for_completed(self, timeout: timedelta) -> None:
        """Waits until any process has done all its work.

        Raises:
            DistStoreError: the time is over.
        """
        self._await(self.ANY_RANK_COMPLETED, timeout)

    def record_terminated_ranks(self, ranks: Iterable[int]) -> None:
        """Notes whose processes are lost, or leave."""
        self.append(*self._line(self.TERMINATED_RANKS, list(ranks)))

    def get_terminated_ranks(self) -> set[int]:
        """Returns whose processes are lost, or left, as all find it that met.

        A process may die in the next generation before its monitor is there. The monitor notes that
        here, while the others read who takes part; all of them must find the same.
        """
        return set(numbers_of(self._end_found()["terminated"]))

    def _end_found(self) -> dict[str, Any]:
        """Returns how the generation ended; before the processes have met, what is there by now.

        The list of terminated ranks is read last: nothing agrees on it before the others go on.
        """
        if self._end is not None:
            return dict(self._end)
        reasons = in_short(self._lines(self.INTERRUPTION_RECORDS).values())
        lines = self._lines(self.TERMINATED_RANKS).values()
        terminated = list(runs_of({rank for ranks in lines for rank in ranks}))
        return {"reasons": reasons, "terminated": terminated}

    def barrier(
        self,
        ranks: Iterable[int],
        group_name: str,
        rendezvous_count: int,
        timeout: timedelta,
        timeout_chunk: timedelta | None = None,
    ) -> None:
        """Waits until as many ranks have arrived; nobody arrives twice.

        Args:
            ranks: numbers below the count.

        Raises:
            BarrierOverflow: more have arrived.
            BarrierTimeout: the time is over.
        """
        ranks = sorted(set(ranks))
        arrivals = self._arrivals(group_name, rendezvous_count)
        mine = by_list(ranks)
        if not mine.keys() <= arrivals.lists.keys():
            raise BarrierOverflow(f"rank {ranks[-1]} of {rendezvous_count} is at {group_name}")
        own = {
            number: self._line(arrivals.key(number), sorted(some)) for number, some in mine.items()
        }
        longest_s = timeout.total_seconds() / _LEAST_LOOKS
        patience_s = min(READING_S, longest_s or READING_S)
        reader = ElectedReader(secrets.token_hex(NONCE_BYTES), patience_s)

        def look(numbers: Iterable[int]) -> None:
            for number in numbers:
                lines = self._lines(arrivals.key(number))
                if number in own and own[number][1].encode().strip() not in lines:
                    self.append(*own[number])
                    lines = self._lines(arrivals.key(number))  # whoever comes last sees all
                count, size = self._count(group_name, lines.values()), len(arrivals.lists[number])
                if count > size:
                    raise BarrierOverflow(f"{count} of {size} are at {group_name}")
                if count == size and arrivals.note_whole(number):
                    self._note_complete(group_name, reader)

        for line in own.values():
            self.append(*line)
        look(own)
        if timeout:
            looks = Looks(
                *(ranks[0] if ranks else 0, arrivals.lists, _LOOK_S),
                processes=rendezvous_count,
                free=_FREE_LOOKS,
                longest_s=longest_s,
            )
            chunk = timeout_chunk or timeout
            found = self._wait_at(group_name, timeout, chunk, looks=looks, look=look)
            self._end = found if group_name == self.ITERATION_BARRIER else self._end

    reentrant_barrier = barrier
    """Counts a rank that arrives twice once."""
    initial_barrier = functools.partialmethod(barrier, group_name=StoreMixin.INITIAL_BARRIER)
    """Waits until all processes have started."""
    completion_barrier = functools.partialmethod(barrier, group_name=StoreMixin.COMPLETION_BARRIER)
    """Waits until all processes have done their work."""
    iteration_barrier = functools.partialmethod(barrier, group_name=StoreMixin.ITERATION_BARRIER)
    """Waits until all processes have left the generation, or are lost."""
    termination_barrier = functools.partialmethod(
        barrier, group_name=StoreMixin.TERMINATION_BARRIER
    )
    """Notes that processes leave the job; who waits waits until all have left."""

    def is_done(self) -> bool:
        """Returns whether all processes have done their work; ask when all have left."""
        return self._is_put(self._complete(self.COMPLETION_BARRIER))

    def _complete(self, group_name: str) -> str:
        return f"{self.BARRIER_PREFIX}:{group_name}:complete"

    def _note_complete(self, group_name: str, reader: ElectedReader) -> None:
        """Ends the wait at a barrier where all have arrived.

        Many may find that at once. At the end of a generation one of them reads what may be as long
        as processes are many; the others read its result, in the place that ends their wait.
        """
        key = self._complete(group_name)
        if group_name != self.ITERATION_BARRIER:
            self._put(key, True)
            return
        name = f"{self.BARRIER_PREFIX}:{group_name}:reader"
        if reader.reads(lambda number: self._first_proposed(f"{name}{number}", reader.own)):
            self._first_proposed(key, self._end_found())

    def is_rank_at_reentrant_barrier(self, rank: int, group_name: str) -> bool:
        """Returns whether a process has arrived at a barrier."""
        lines = self._lines(list_key(self._arrived(group_name), list_of(rank)))
        return any(rank in ranks for ranks in lines.values())

    def _count(self, group_name: str, arrivals: Iterable[Sequence[int]]) -> int:
        ranks = [rank for some in arrivals for rank in some]
        again = {self.ITERATION_BARRIER, self.TERMINATION_BARRIER}
        return len(set(ranks) if group_name in again else ranks)

    def _wait_at(
        self,
        group_name: str,
        timeout: timedelta,
        chunk: timedelta,
        *,
        looks: Looks,
        look: Callable[[Iterable[int]], None],
    ) -> Any:
        deadline_s = time.monotonic() + timeout.total_seconds()
        looks.due()  # it has just looked
        chunk = min(chunk, timedelta(seconds=looks.interval_s))
        key = self._complete(group_name)
        while True:
            try:
                return self._await(key, left_by(deadline_s, chunk.total_seconds()))
            except dist.DistStoreError as error:
                if time.monotonic() >= deadline_s:
                    raise BarrierTimeout(f"{group_name} after {timeout}") from error
            look(looks.due())

    def _arrivals(self, group_name: str, count: int) -> Attendance:
        return Attendance(
            self._arrived(group_name),
            range(count),
            add=lambda key, number: self.append(*self._line(key, number)),
            read=lambda key: self._lines(key).values(),
        )

    def _arrived(self, group_name: str) -> str:
        return f"{self.BARRIER_PREFIX}:{group_name}:arrived"

    def _await(self, key: str, timeout: timedelta) -> Any:
        deadline_s = time.monotonic() + timeout.total_seconds()
        self.wait([key], timeout)
        while (found := self._document(key)) is None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise ForeignValueError(self._foreign(key))
            time.sleep(min(left_s, _SLICE_S))
        return found

    def _of_all(self, name: str, ranks: Iterable[int]) -> list[Any]:
        """Returns what each of some processes has written; waits until all of it is there.

        The first of them reads all and writes it in one place, equal neighbours once; the others
        read that. Where it is lost each reads all, at the latest when the time is over.
        """
        keys, together = [name.format(rank=rank) for rank in ranks], name.format(rank="of_all")
        is_first, own = keys[0] in self._written, self._written.keys() & keys
        deadline_s = time.monotonic() + self.timeout.total_seconds()
        if own and not is_first:
            if runs := self._of_first(together, own, len(keys), deadline_s):
                return [document for length, document in runs for _ in range(length)]
            deadline_s = max(deadline_s, time.monotonic() + READING_S)
        found = self._read(keys, deadline_s)
        if is_first:
            runs = [[len(list(run)), document] for document, run in itertools.groupby(found)]
            self._put(together, runs if len(json.dumps(runs)) <= _MOST_CHARACTERS else [])
        return found

    def _of_first(self, key: str, own: Iterable[str], processes: int, deadline_s: float) -> Any:
        """Returns what the first process has written; None where that is lost."""
        look_s, looks = slice_s(_SLICE_S, processes), _LEAST_LOOKS
        while looks and time.monotonic() < deadline_s:
            with contextlib.suppress(dist.DistStoreError):
                self.wait([key], left_by(deadline_s, look_s))
                if (document := self._opened(key, self.get(key))) is not None:
                    return document
                looks -= 1
                time.sleep(left_by(deadline_s, look_s).total_seconds())
            for each in own:  # a stranger may have removed it
                if not self._is_put(each):
                    self.set(each, self._written[each])
        return None

    def _read(self, keys: list[str], deadline_s: float) -> list[Any]:
        """Returns documents; waits until all of them are there."""
        while True:
            self.wait(keys, left_by(deadline_s))
            found = [self._opened(*one) for one in zip(keys, self.multi_get(keys), strict=True)]
            if None not in found:
                return found
            if time.monotonic() >= deadline_s:
                raise ForeignValueError(self._foreign(keys[found.index(None)]))
            for key, document in zip(keys, found, strict=True):
                if document is None and key in self._written:
                    self.set(key, self._written[key])
            time.sleep(left_by(deadline_s, _SLICE_S).total_seconds())
