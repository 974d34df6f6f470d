# SPDX-License-Identifier: Apache-2.0
"""The training program with measurements that are known before: `--stalled=STEP`, first.

From that step on every rank measures stalls, and bandwidths at which slots of the W that was
planned fit; before it none, and a hundred times these bandwidths.
"""

import dataclasses
import sys

from megatron_moevement.policy.watching.measurements import NOT_MEASURED, Measured
from megatron_moevement.strategies.moevement.sparse_checkpointing import SparseCheckpointing
from megatron_moevement.training.program import main

ITERATION_S = 1.0


def measure(first_stalled):
    await_commit = SparseCheckpointing.await_commit

    def measuring(self, step):
        covered = await_commit(self, step)
        if covered.measured == NOT_MEASURED:
            return covered
        slot_bytes = self._session.memory.plan.schedule.worst_slot_bytes
        is_stalled = step >= first_stalled
        rate = slot_bytes * (1.2 if is_stalled else 120) / ITERATION_S
        measured = Measured(rate, rate, ITERATION_S, ITERATION_S if is_stalled else 0.0)
        return dataclasses.replace(covered, measured=measured.vote)

    SparseCheckpointing.await_commit = measuring


if __name__ == "__main__":
    _, stalled, *flags = sys.argv
    measure(int(stalled.removeprefix("--stalled=")))
    sys.exit(main(flags))
