# SPDX-License-Identifier: Apache-2.0
"""Resident: what of a process outlives an in-process restart; it holds no process group between.

Model, optimizer and all that drives them are built once and stay the same objects. So does the
store with the snapshots. A generation lends them its groups.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_moevement.backends.backend import Backend
from megatron_moevement.integrations.megatron.group_keys import gather_as_upstream
from megatron_moevement.integrations.megatron.group_references import GroupReferences
from megatron_moevement.integrations.megatron.process_groups import abandon_groups
from megatron_moevement.policy.outcome.futility import Futility, InVainError
from megatron_moevement.policy.outcome.outage import OutageBegin
from megatron_moevement.policy.recovery.lifecycle import Phase
from megatron_moevement.runtime.coordination.generation import Generation, Interruption, Loss
from megatron_moevement.runtime.faults.fault_points import NO_FAULTS
from megatron_moevement.runtime.interrupts.group_calls import close_calls
from megatron_moevement.runtime.interrupts.interruptible_wait import count_connecting
from megatron_moevement.runtime.interrupts.reaper import count_stuck
from megatron_moevement.runtime.observation.events import EventName, Events
from megatron_moevement.runtime.observation.host_health import HostHealth, UnhealthyError
from megatron_moevement.runtime.observation.process_events import ProcessEvents
from megatron_moevement.runtime.observation.timestamp import timestamp
from megatron_moevement.runtime.observation.watch import Watch
from megatron_moevement.runtime.slots.store_identity import RunIdentity
from megatron_moevement.runtime.stores.place import store_place, store_root
from megatron_moevement.settings.launch import Launch
from megatron_moevement.strategies.registry import STRATEGIES
from megatron_moevement.strategies.resident_state import IdleSpare
from megatron_moevement.training.arguments import Arguments
from megatron_moevement.training.fault_injection import scripted_faults
from megatron_moevement.training.job import Job, build_part, join
from megatron_moevement.training.knowledge import Known, share
from megatron_moevement.training.run_identity import agree_on_identity, flags_digest
from megatron_moevement.training.watching import open_watch

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Part:
    """The live objects of a rank, and where they keep process groups."""

    job: Job
    references: GroupReferences


class Resident:
    """The living part of one process of a job; its training thread uses it."""

    def __init__(
        self,
        arguments: Arguments,
        backend: Backend,
        watch: Watch | None = None,
        process_events: ProcessEvents | None = None,
    ) -> None:
        """Begins with nothing built.

        Args:
            watch: is told what this process does; None: begins when the process gets a place.
            process_events: records what it does while it has none.
        """
        self._arguments = arguments
        self._backend = backend
        self._faults = NO_FAULTS
        self._part: _Part | None = None
        self.identity: RunIdentity | None = None
        """Of the run; None before this process was in a generation."""
        self.futility = Futility()
        """What came of the restarts so far."""
        self._flags = flags_digest(arguments)  # a spare has it before it is needed
        self._generation: Generation | None = None
        self._interrupted: Phase | None = None
        self._is_known = False
        self._entered_s = self._joined_s = 0.0
        self._stepped_s: float | None = None
        self.interruption = Interruption()
        settings = arguments.fault_tolerance
        self.kept = STRATEGIES[settings.moevement_strategy].begin(settings)
        self.process_events = process_events
        self.watch = watch or Watch()
        self._is_watched = watch is not None
        self.builds = 0
        """How often model and optimizer were built; survivors of a restart don't build again."""

    @property
    def committed(self) -> int:
        """The newest step whose loss this process knows; 0 before the first."""
        return 0 if self._part is None else self._part.job.ledger.newest

    @property
    def event_dir(self) -> str | None:
        """Where the job records events, whatever the working directory of who reads it is."""
        directory = self._arguments.logging.moevement_event_dir
        return None if directory is None else os.path.abspath(directory)

    def be_watched(self, generation: Generation) -> None:
        """Begins the set-up of a generation; a spare that waits is nobody to be watched.

        Raises:
            UserError: there is nobody who would.
        """
        if self._arguments.monitoring.enable_ft_package and not self._is_watched:
            with generation.uninterrupted():
                self.watch = open_watch(self._arguments)
                self._is_watched = True
        self.watch.restart()

    def enter(self, generation: Generation, launch: Launch) -> Job:
        """Joins the job in a new generation; every rank calls it, in step.

        Args:
            generation: owns what is opened from now on.
            launch: the place of this process in it.

        Returns:
            The job with the generation's groups; of a survivor, the same objects as before, with
            what the interrupted step left: finished gradients may be wanted.
        """
        self._generation = generation
        self._entered_s = time.time()
        torch.set_grad_enabled(True)  # an interrupt inside of torch.no_grad leaves it off
        self.kept.store.keep()
        is_restartable = self._arguments.restart.inprocess_restart
        number = generation.number if is_restartable else None
        part = self._part
        if part is not None and part.job.launch != launch:
            self._part = part = None
        if part is None:
            self._faults = scripted_faults(self._arguments, launch, self.identity)
        self._faults.enter(generation.number)
        groups = join(self._arguments, launch, self._backend, self._faults, number)
        self._joined_s = time.time()
        device = self._backend.device(launch.local_rank)
        known = self._share(generation, launch, part, device)
        if part is None:
            self.kept.renew()
            assert self.identity is not None
            job = build_part(
                self._arguments,
                self.identity,
                launch,
                self._backend,
                groups,
                faults=self._faults,
                known=known.keys,  # who was built before does not build again
            )
            self._keep(job)
        else:
            part.references.rebind()
            part.job.timers.forget()
            job = part.job
        return job

    def _share(
        self, generation: Generation, launch: Launch, part: _Part | None, device: torch.device
    ) -> Known:
        """Returns what the job knows, which is the same on all ranks.

        Raises:
            InVainError: on all ranks: another restart would not help.
        """
        own = Known(self.identity, None if part is None else part.job.keys, self.futility)
        processes = launch.world_size + (generation.spares or 0)
        known = share(own, self._flags, self.committed, processes, device)
        self.futility = known.futility
        if known.futility.is_over:
            raise InVainError(f"{known.futility.in_vain} restarts in a row led to no new step")
        self.identity = known.identity or agree_on_identity(self._arguments, device)
        return known

    def hold(self, generation: Generation, launch: Launch, domain: str) -> IdleSpare:
        """Returns what this process does for the ranks while it waits for a place.

        Args:
            domain: what it may be lost together with.
        """
        self._generation = generation
        if self.process_events is not None:
            self.process_events.waits(generation.number)
        self._backend.device(launch.local_rank)  # before it is needed
        self.kept.store.keep()
        return self.kept.hold(launch, domain, generation, self._backend.pin)

    def check_health(self) -> None:
        """Checks that this process can go on, before it joins a generation.

        Raises:
            UnhealthyError: its machine does not serve it.
        """
        if self.kept.store.refusal is not None:
            raise UnhealthyError(self.kept.store.refusal)
        store, root = self.kept.store.folder, None
        settings = self._arguments.fault_tolerance
        if settings.is_on:
            root = store_root(settings)
        save = self._arguments.checkpointing.save
        HostHealth(store, root, None if save is None else Path(save)).check()

    def announce(self, events: Events) -> None:
        """Records that this process begins, or that it survived a fault."""
        noticed_s = self.interruption.noticed_s
        losses = self.interruption.losses
        if losses and dist.get_rank() == 0:
            self._tell(losses)
        if not self._is_known or noticed_s is None:
            run_id: str | None = None
            if self.identity is not None:
                _, run_id = store_place(self._arguments.fault_tolerance, self.identity)
            events.emit(
                EventName.PROCESS_START,
                0,
                entered_s=self._entered_s,
                joined_s=self._joined_s,
                run_id=run_id,
            )
        else:
            begin = OutageBegin.between(noticed_s, self._stepped_s, self._entered_s, self._joined_s)
            self.kept.note_outage(begin.durations_s, self._joined_s)
            events.emit(
                EventName.FAULT_DETECTED,
                self.committed,
                noticed_s=begin.noticed_s,
                phase=None if self._interrupted is None else self._interrupted.value,
                losses=[dataclasses.asdict(loss) for loss in losses],
                last_step_s=self._stepped_s,
                teardown_s=begin.teardown_s,
                rendezvous_s=begin.rendezvous_s,
                builds=self.builds,
                threads=len(os.listdir("/proc/self/task")),
                descriptors=len(os.listdir("/proc/self/fd")),
                stuck_groups=count_stuck() + count_connecting(),
            )
        self._is_known = True

    def note_step(self) -> None:
        """Notes that a step is trained: an outage begins with the newest one."""
        self._stepped_s = time.time()

    def _tell(self, losses: Sequence[Loss]) -> None:
        """Gives the user a line for each lost process."""
        noticed_s = self.interruption.noticed_s or self._entered_s
        when = timestamp(noticed_s)
        for loss in losses:
            logger.warning("%s loss of %s", when, loss.line)

    def rebuild(self, job: Job) -> None:
        """Builds model and optimizer anew, as at the start of the program, with the same groups.

        Args:
            job: has trained, and nothing is there to bring its state back from. Its former objects
                are gone before it gets new ones: a device may have no room for both.
        """
        launch, groups, identity = job.launch, job.groups, job.identity
        self._part = None
        self.kept.renew()
        job.rebuild(
            lambda: build_part(
                self._arguments, identity, launch, self._backend, groups, faults=self._faults
            )
        )
        self._keep(job)

    def leave(self) -> None:
        """Cleans up after an interrupted generation, whatever state it is in."""
        generation, self._generation = self._generation, None
        self._interrupted = None if generation is None else generation.phase
        if generation is not None:
            generation.close()
        if self._part is not None:
            self._part.references.release()
        abandon_groups()
        close_calls()  # an interrupt may have come before anybody else could
        gather_as_upstream()

    def close(self) -> None:
        """Lets go of the store at the end of the program: removes it if nobody will go on."""
        self.kept.store.close()
        self.watch.close()

    def _keep(self, job: Job) -> None:
        self.builds += 1
        if not self._arguments.restart.inprocess_restart:
            return
        roots = [job.chunks, job.optimizer, job.schedule, job.metrics, job.groups, job.durable]
        self._part = _Part(job, GroupReferences(roots))
