# SPDX-License-Identifier: Apache-2.0
"""One run of training: in the only generation of a process, or in one of several."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from pathlib import Path

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.process_groups import leave_job
from megatron_moevement.runtime.coordination.generation import Generation
from megatron_moevement.runtime.stores.fault_record import remove_record
from megatron_moevement.runtime.stores.place import store_place
from megatron_moevement.settings.launch import Launch
from megatron_moevement.strategies.strategy import RecoveryAbortedError, UnprovenStateError
from megatron_moevement.training.arguments import Arguments
from megatron_moevement.training.ending import report_end
from megatron_moevement.training.fault_injection import check_struck
from megatron_moevement.training.loop import train
from megatron_moevement.training.operator_table import write_operators
from megatron_moevement.training.resident import Resident
from megatron_moevement.training.state_digest import check_state_digest_path, write_state_digest
from megatron_moevement.training.step import DivergenceError
from megatron_moevement.training.stop_request import StopSources

Ending = UserError | DivergenceError | RecoveryAbortedError | UnprovenStateError
"""What another generation would end with as well."""

_PATIENCE_DONE = timedelta(seconds=60)
"""The last rank draws its plots and closes its writers meanwhile."""
_PATIENCE_REFUSED = timedelta(seconds=5)
"""All ranks find the same, each in its own time; one alone must not wait for long."""
_PATIENCE_WITH_THE_DYING = timedelta(seconds=5)
"""Who got the same Ctrl-C ends meanwhile, and the system takes apart who was killed before it."""


@dataclasses.dataclass
class GenerationRun:
    """Trains, as often as it takes; the training thread calls it."""

    arguments: Arguments
    resident: Resident
    stop: StopSources
    place: Launch | None = None
    """That the process occupied last; None before it has any."""

    def alone(self, launch: Launch) -> None:
        """Trains in the only generation of a process; every rank calls it.

        Raises:
            UserError: the arguments don't fit machine, data or checkpoint.
            DivergenceError: the gradients are not finite.
        """
        self.place = launch
        patience = timedelta(0)  # after a failure: closed connections tell the peers
        try:
            with Generation() as generation:
                self._train(generation, launch)
            patience = _PATIENCE_DONE
        except UserError:
            patience = _PATIENCE_REFUSED
            raise
        finally:
            leave_job(patience)

    def in_generation(self, generation: Generation, launch: Launch) -> Ending | None:
        """Trains in one of several generations; every rank calls it.

        An exception leads to another generation, which cleans up; so what another one would end
        with as well is returned.
        """
        self.place = launch
        failure: Ending | None = None
        patience = _PATIENCE_DONE
        try:
            with generation:
                self._train(generation, launch)
        except (UserError, DivergenceError, RecoveryAbortedError, UnprovenStateError) as error:
            failure, patience = error.with_traceback(None), _PATIENCE_REFUSED
        leave_job(patience)
        return failure

    def leave(self) -> None:
        """Cleans up after a generation that was interrupted by a fault.

        Raises:
            KeyboardInterrupt: by Ctrl-C as well: there is no other one.
        """
        self.resident.leave()
        self.stop.check()

    def abandon(self) -> None:
        """Gives up what is kept for a relaunch: Ctrl-C was pressed, wherever the process was.

        What recovers only leaves everything as it is.
        """
        settings = self.arguments.fault_tolerance
        if not settings.moevement_recover_only:
            self.resident.kept.store.abandon(_PATIENCE_WITH_THE_DYING)
            if self.resident.identity is not None:
                root, run_id = store_place(settings, self.resident.identity)
                remove_record(root / run_id)
        self.resident.close()

    def _train(self, generation: Generation, launch: Launch) -> None:
        file = self.arguments.run.moevement_state_digest
        self.resident.be_watched(generation)
        job = self.resident.enter(generation, launch)
        operators = self.arguments.fault_tolerance.moevement_operators
        if operators is not None:
            write_operators(job, Path(operators))
            return
        if file is not None:
            check_state_digest_path(job, Path(file))
        ending = train(job, self.stop, self.resident, generation)
        if file is not None:
            write_state_digest(job, ending.progress, Path(file))
        check_struck(job, ending.progress)
        report_end(job, ending)
