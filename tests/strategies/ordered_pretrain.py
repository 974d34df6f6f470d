# SPDX-License-Identifier: Apache-2.0
"""The training program, which writes down in what order steps, passes and copies begin."""

import sys

from megatron_moevement.integrations.megatron.pipeline_schedule import PipelineSchedule
from megatron_moevement.runtime.capture.capture import Capture
from megatron_moevement.settings.launch import Launch
from megatron_moevement.strategies.moevement.sparse_checkpointing import SparseCheckpointing
from megatron_moevement.training.program import main

PREFIX = "--order-into="


def write_down(path):
    commit, forward, take = (
        SparseCheckpointing.commit,
        PipelineSchedule._forward_step,
        Capture._take,
    )

    def note(line):
        with open(path, "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def commit_it(self, entry, progress, covered):
        note("commit")  # what it begins may run before it returns
        commit(self, entry, progress, covered)

    def pass_on(self, batches, chunk):
        note("forward")
        return forward(self, batches, chunk)

    def take_it(self, snapshot):
        note("copies")
        take(self, snapshot)

    SparseCheckpointing.commit, PipelineSchedule._forward_step = commit_it, pass_on
    Capture._take = take_it


if __name__ == "__main__":
    (given,) = [argument for argument in sys.argv if argument.startswith(PREFIX)]
    write_down(f"{given.removeprefix(PREFIX)}.{Launch.from_environment().rank}")
    sys.exit(main([argument for argument in sys.argv[1:] if argument != given]))
