# SPDX-License-Identifier: Apache-2.0
"""Holdings: the files of a process under the job's plan, and the host memory that they take."""

from __future__ import annotations

import threading

from megatron_moevement.policy.copies.placement import Host
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.runtime.peers.stored_slots import StoredSlots
from megatron_moevement.runtime.slots.journal import Journal
from megatron_moevement.runtime.slots.ring_file import RingFile
from megatron_moevement.runtime.stores.store import RingRole, StoreDirectory, StoredRing
from megatron_moevement.strategies.moevement.protection.job_plan import JobPlan
from megatron_moevement.strategies.moevement.protection.resident_store import StoresOfRun


class Holdings:
    """What a process holds for itself and for others.

    The training thread opens it. A thread of the server adds rings that this process takes over.
    """

    def __init__(self, plan: JobPlan, host: Host, store: StoreDirectory) -> None:
        """Opens nothing yet.

        Args:
            host: this process.
            store: its files, locked.
        """
        self.plan = plan
        """What all agreed on, and for whom else this process keeps copies since then."""
        self.host_bytes = plan.account_of(host).total_bytes
        """Host memory in use; all of it is allocated at the start, but for what is taken over."""
        self.host = host
        self.store = store
        self._run = StoresOfRun(store.root, store.identity)
        self._left_behind = self._run.left_behind()  # all live processes have locked their stores
        self._lock = threading.Lock()  # of the store's files, once the server listens

    @property
    def own_ring(self) -> RingFile:
        """The ring of this rank's slots; made where it is missing."""
        owner = self.host.occupied
        return self.store.ring(RingRole.OWN, owner, self.plan.rings[owner])

    @property
    def journal(self) -> Journal:
        """The journal of this process; made where it is missing."""
        return self.store.journal(self.plan.journal)

    def open(self) -> StoredSlots:
        """Opens the files that are there, and makes those that are missing.

        Returns:
            What a server keeps copies in and gives slots out of.

        Raises:
            UserError: files are of other sizes, or the file system is full.
        """
        self._check_space(self.plan)
        self.store.journal(self.plan.journal)
        slots = StoredSlots(self.own_ring, self._take_over)
        for owner in self.plan.kept_for(self.host.process):
            slots.keep(self.store.ring(RingRole.HELD, owner, self.plan.rings[owner]))
        for stored in self._rings_of_former_plans():
            ring = self.store.open_ring(stored.role, stored.owner)
            if ring is not None and self._may_take_copies(stored):
                slots.keep(ring)
            elif ring is not None:
                slots.serve(ring)
        return slots

    def forget_left_behind(self) -> None:
        """Removes what processes left that had died before the generation began."""
        self._run.remove_left_behind(self._left_behind)

    def forget_others(self, slots: StoredSlots) -> None:
        """Removes the slots that this process keeps for nobody any more."""
        with self._lock:
            for stored in self._rings_of_former_plans():
                ring = self.store.open_ring(stored.role, stored.owner)
                if ring is not None:
                    slots.drop(ring)
                self.store.drop_ring(stored.role, stored.owner)

    def _take_over(self, owner: LogicalRank) -> RingFile | None:
        """Returns a ring for a rank of which another process was to keep copies.

        Raises:
            UserError: there is no room for it.
        """
        if owner not in self.plan.rings or owner == self.host.rank:
            return None
        with self._lock:
            plan = self.plan.with_holder(owner, self.host.process)
            plan.check_limit(self.host.process)
            self._check_space(plan)
            ring = self.store.ring(RingRole.HELD, owner, plan.rings[owner])
            self.plan = plan
            self.host_bytes += plan.rings[owner].total_bytes
        return ring

    def _check_space(self, plan: JobPlan) -> None:
        account = plan.account_of(self.host)
        self.store.check_space(account.total_bytes - account.logs_bytes)  # which lie in no file

    def _rings_of_former_plans(self) -> tuple[StoredRing, ...]:
        """Returns the rings with slots that others may lack, and that are not in the plan.

        Copies stay where they are, but for those of lost processes; where the limit of host memory
        leaves no room for that, all are spread anew. Where a launch exchanges ranks between
        processes, a process finds others' own slots.
        """
        return tuple(stored for stored in self.store.rings() if not self._is_planned(stored))

    def _is_planned(self, stored: StoredRing) -> bool:
        if stored.role is RingRole.HELD:
            return self.plan.keeps(self.host.process, stored.owner)
        return (stored.role, stored.owner) == (RingRole.OWN, self.host.rank)

    def _may_take_copies(self, stored: StoredRing) -> bool:
        """Returns whether an owner may still send copies into a ring of a former plan."""
        is_kept = self.plan.keeps(self.host.process, stored.owner)
        return stored.role is RingRole.HELD and stored.owner != self.host.rank and not is_kept
