# SPDX-License-Identifier: Apache-2.0
"""Link measurement: the processes of a launch measure what copies between them bring.

Process 0 leads: it plans the job, and the others do what they are asked for.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Self

from megatron_moevement.backends.backend import choose, load
from megatron_moevement.errors import UserError
from megatron_moevement.policy.copies.loopback import Receiver, check_reachable
from megatron_moevement.policy.preflight.forecast import JobForecast
from megatron_moevement.policy.preflight.links import (
    Greeting,
    LinkReport,
    LinkTask,
    MeasuredLinks,
    link_tasks,
)
from megatron_moevement.runtime.closing import Closing
from megatron_moevement.runtime.coordination.meeting import EndedError, Meeting, Note
from megatron_moevement.runtime.links.link_probe import LinkProbe
from megatron_moevement.runtime.observation.machine import existing_folder
from megatron_moevement.runtime.stores.place import store_root
from megatron_moevement.runtime.transport.handshake import Session
from megatron_moevement.runtime.transport.interface import own_network
from megatron_moevement.settings.launch import Launch
from megatron_moevement.training.arguments import Arguments, parse


class _Participant(Closing):
    """One process: greets the others, and measures."""

    def __init__(
        self, meeting: Meeting, launch: Launch, arguments: Arguments, patience: timedelta
    ) -> None:
        """Listens where the job would, and greets.

        Args:
            patience: with a transfer that does not move on.

        Raises:
            UserError: the interface is none of this machine's, or all of them.
        """
        self._meeting, self._launch, self._arguments = meeting, launch, arguments
        settings = arguments.fault_tolerance.of_process(launch.local_rank)
        self._folder = existing_folder(store_root(settings))
        me = Session(meeting.token, launch.process, 0)
        self._probe = LinkProbe(settings.moevement_replication_interface, me, patience)
        address, port = self._probe.address
        domain = settings.moevement_failure_domain or launch.failure_domain
        greeting = Greeting(socket.gethostname(), own_network(), address, port, domain)
        meeting.post(Note.GREETING, greeting.document())

    @classmethod
    def of_flags(
        cls, meeting: Meeting, launch: Launch, flags: Sequence[str], patience: timedelta
    ) -> Self:
        """Returns the participant of a process of a job.

        Args:
            flags: of the job.
            patience: with a transfer that does not move on.

        Raises:
            UserError: the job would refuse the flags, or the interface.
        """
        arguments = parse(flags, launch.processes, launch.world_size)
        return cls(meeting, launch, arguments, patience)

    def prepare(self, task: LinkTask) -> None:
        """Makes memory for what is sent, and notes it.

        Raises:
            UserError: there is no room, no device, or too little memory may be locked.
        """
        self._task = task
        self._backend = load(choose(self._arguments.run.moevement_backend))
        self._device = self._backend.device(self._launch.local_rank)
        self._probe.prepare(task, self._folder, self._backend.pin)
        self._meeting.post(Note.READY, 0)

    def measure(self) -> None:
        """Measures, and reports it."""
        stream = self._backend.copy_stream()
        report = self._probe.measure(self._task, stream, self._device)
        self._meeting.post(Note.REPORT, report.document())

    def close(self) -> None:
        """Ends what it has begun."""
        self._probe.close()


def take_part(meeting: Meeting, launch: Launch, flags: Sequence[str], patience: timedelta) -> int:
    """Does what process 0 asks for; the other processes call it.

    Args:
        flags: of the job.
        patience: with a transfer that does not move on.

    Returns:
        The exit code with which process 0 ends.
    """
    try:
        with _Participant.of_flags(meeting, launch, flags, patience) as own:
            task = meeting.await_first(Note.TASK, for_me=True)
            own.prepare(LinkTask.of_document(task))
            meeting.await_first(Note.GO)
            own.measure()
            return meeting.await_end()
    except UserError as error:
        meeting.post(Note.REFUSAL, "; ".join(error.messages))
    except EndedError:
        pass
    return meeting.await_end()


class LinkLeader(Closing):
    """Process 0, which leads the measurement."""

    def __init__(
        self, meeting: Meeting, launch: Launch, flags: Sequence[str], patience: timedelta
    ) -> None:
        """Waits for all processes to come.

        Args:
            flags: of the job.
            patience: with a transfer that does not move on.

        Raises:
            UserError: one does not come or refuses, or the job would refuse the flags.
        """
        self._meeting = meeting
        self._own = _Participant.of_flags(meeting, launch, flags, patience)
        try:
            found = meeting.await_from(Note.GREETING)
        except BaseException:
            self._own.close()
            raise
        self.greetings: Mapping[int, Greeting] = {
            process: Greeting.of_document(one) for process, one in sorted(found.items())
        }

    def measure(self, forecast: JobForecast) -> MeasuredLinks:
        """Returns what all processes measure at a time, as copies go in a job.

        Raises:
            UserError: processes don't reach each other, have no room, or give no sign of life.
        """
        check_reachable(
            [Receiver(process, one.network, one.address) for process, one in self.greetings.items()]
        )
        meeting, tasks = self._meeting, link_tasks(forecast, self.greetings)
        for process, task in tasks.items():
            meeting.post(Note.TASK, task.document(), process)
        self._own.prepare(tasks[0])
        meeting.await_from(Note.READY)
        meeting.post(Note.GO, 0)
        self._own.measure()
        reports = meeting.await_from(Note.REPORT)
        return MeasuredLinks(
            self.greetings,
            {process: LinkReport.of_document(one) for process, one in sorted(reports.items())},
        )

    def close(self) -> None:
        """Ends what it has begun."""
        self._own.close()
