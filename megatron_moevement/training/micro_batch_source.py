# SPDX-License-Identifier: Apache-2.0
"""This rank's micro-batches, on its device, step after step."""

from __future__ import annotations

from megatron_moevement.integrations.megatron.pipeline_schedule import MicroBatch
from megatron_moevement.runtime.closing import Closing
from megatron_moevement.training.data.batches import MicroBatches, SampleDataset
from megatron_moevement.training.job import Job

_NOTHING: MicroBatch = dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids"))
"""What a stage between the first and the last gets: its input comes from its neighbour."""


class MicroBatchSource(Closing):
    """Feeds consecutive steps; a context manager, because it fetches ahead in threads."""

    def __init__(
        self, job: Job, dataset: SampleDataset | None, *, consumed_samples: int, num_steps: int
    ) -> None:
        """Starts at a data cursor.

        Args:
            dataset: samples of one split, the same on all ranks.
            consumed_samples: the data cursor of the first step.
            num_steps: steps that will be asked for at the most.
        """
        data, place = job.arguments.data, job.position
        self._device = job.device
        self._num_microbatches = job.batches.num_microbatches
        self._steps = None
        if place.reads_data and dataset is not None and num_steps > 0:
            batches = MicroBatches(dataset, job.batches, place.dp, data.vocab_size)
            self._steps = batches.steps(consumed_samples, num_steps, data.flags.num_workers)

    def next_step(self) -> list[MicroBatch]:
        """Returns the micro-batches of the next step."""
        if self._steps is None:
            return [_NOTHING] * self._num_microbatches
        return [
            {name: tensor.to(self._device, non_blocking=True) for name, tensor in batch.items()}
            for batch in next(self._steps)
        ]

    def close(self) -> None:
        """Ends the threads; closing twice is fine."""
        if self._steps is not None:
            self._steps.close()
