# SPDX-License-Identifier: Apache-2.0
"""The rank monitor of `ft_launcher`: a process beside each rank, which kills it when it hangs.

The monitor knows two kinds of limits, of the time between two heartbeats and of the time that a
section is open, both from the command line of `ft_launcher`. Facts: megatron/training/
ft_integration.py of Megatron-LM, `fault_tolerance/` of nvidia-resiliency-ext.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from nvidia_resiliency_ext.fault_tolerance.rank_monitor_client import (
    RankMonitorClient,
    RankMonitorClientError,
)

from megatron_moevement.errors import UserError
from megatron_moevement.policy.watching.section_limits import OUTSIDE, SectionLimits, longest_of_all
from megatron_moevement.runtime.coordination.agreement import all_gather_json
from megatron_moevement.runtime.observation.watch import Moment, Section, Watch
from megatron_moevement.settings.rank_monitor import RankMonitoring
from megatron_moevement.settings.restart import InProcessRestart

logger = logging.getLogger(__name__)

STATE_NAME = "ft_state.json"
"""Where Megatron-LM keeps learned limits in `--save`, too."""
_Message = Callable[[RankMonitorClient], None]
_LONGEST_WAIT_S = 5.0


class RankMonitor(Watch):
    """Tells the monitor of this rank what its training thread does.

    A thread sends, in order: an interrupt of the training thread then never cuts a message off, and
    a monitor that is slow keeps nobody waiting.
    """

    def __init__(
        self, settings: RankMonitoring, restart: InProcessRestart, save: str | None
    ) -> None:
        """Connects.

        Args:
            restart: those of in-process restart, which must be quicker than the monitor.
            save: folder for durable checkpoints; what is learned lies there.

        Raises:
            UserError: there is no monitor, or its limits don't fit.
        """
        super().__init__(settings.ft_num_warmup_iters)
        self._file = None if save is None else Path(save) / STATE_NAME
        self._learns = settings.calc_ft_timeouts
        client = _connect()
        self._names = frozenset(client.cfg.rank_section_timeouts)
        self._factor = float(client.cfg.safety_factor)
        self._limits = self._known_limits(client)
        if self._limits.learned:
            client.load_state_dict(self._limits.document())
        _check(client, self._names, self._limits, restart)
        self._messages: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._send, args=(client,), name="rank monitor", daemon=True
        )
        self._thread.start()

    def restart(self) -> None:
        """Begins the set-up: at the start, and after whatever interrupt."""
        super().restart()
        self._messages.put(RankMonitorClient.end_all_sections)
        self.opened(Section.SETUP)

    def beat(self) -> None:
        """Says that the rank lives."""
        self._messages.put(RankMonitorClient.send_heartbeat)

    def opened(self, section: Section) -> None:
        """Says that a section begins, if the monitor limits it."""
        if section.value in self._names:
            self._messages.put(lambda client: client.start_section(section.value))

    def closed(self, section: Section) -> None:
        """Says that a section ends."""
        if section.value in self._names:
            self._messages.put(lambda client: client.end_section(section.value))

    def learn(self, moment: Moment, device: torch.device) -> None:
        """Learns limits from what all ranks have seen; every rank calls it, in step."""
        if not self._learns:
            return
        seen = all_gather_json(dict(self.longest_s(moment)), device)
        limits = self._limits.learn(longest_of_all(seen), self._factor)
        if limits == self._limits:
            return
        self._limits = limits
        document = limits.document()
        self._messages.put(lambda client: client.load_state_dict(document))
        if torch.distributed.get_rank() == 0 and self._file is not None:
            _replace(self._file, json.dumps(document))

    def close(self) -> None:
        """Says that no section is open, and lets the monitor go."""
        self._messages.put(RankMonitorClient.end_all_sections)
        self._messages.put(None)
        self._thread.join(_LONGEST_WAIT_S)

    def _known_limits(self, client: RankMonitorClient) -> SectionLimits:
        seconds = dict(client.cfg.rank_section_timeouts)
        limits = SectionLimits({**seconds, OUTSIDE: client.cfg.rank_out_of_section_timeout})
        if self._file is None:
            return limits
        try:
            return limits.updated(json.loads(self._file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return limits
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self._file} holds no limits of sections ({error!r}); remove it to begin with "
                "those of ft_launcher"
            ) from error

    def _send(self, client: RankMonitorClient) -> None:
        """Sends one message after the other; without a monitor, drops them."""
        is_heard = True
        while (message := self._messages.get()) is not None:
            if not is_heard:
                continue
            try:
                message(client)
            except (RankMonitorClientError, OSError) as error:
                is_heard = False
                logger.warning("the rank monitor hears no more of this rank: %s", error)
        if is_heard:
            client.shutdown_workload_monitoring()


def _replace(path: Path, text: str) -> None:
    """Writes a file that others find whole; without it the next launch learns again."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        logger.warning("%s is not written: %s", path, error)


def _connect() -> RankMonitorClient:
    client = RankMonitorClient()
    try:
        client.init_workload_monitoring()
    except (RankMonitorClientError, OSError, AttributeError) as error:
        raise UserError(
            f"--enable-ft-package: the rank monitor does not answer: {error}"
        ) from error
    return client


def _check(
    client: Any, names: frozenset[str], limits: SectionLimits, restart: InProcessRestart
) -> None:
    """Checks that the monitor limits what there is, and leaves in-process restart its time.

    Raises:
        UserError: it doesn't.
    """
    known = [section.value for section in Section]
    unknown = sorted(names - set(known))
    if unknown:
        raise UserError(
            f"--ft-rank-section-timeouts of ft_launcher: there is no section {unknown[0]!r}; "
            f"there are {', '.join(known)}"
        )
    if not restart.inprocess_restart:
        return
    found: dict[str, float | None] = {
        "--ft-rank-heartbeat-timeout": client.cfg.rank_heartbeat_timeout,
        **{f"the limit of {name}": seconds for name, seconds in limits.seconds.items()},
    }
    barrier_s = restart.times["barrier_timeout"].total_seconds()
    for name, limit_s in found.items():
        if limit_s is not None and limit_s <= barrier_s:
            raise UserError(
                f"--inprocess-barrier-timeout {barrier_s:g} must be less than {name} of "
                f"ft_launcher, {limit_s:g}: ranks that restart in place would be killed"
            )
