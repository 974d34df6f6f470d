# SPDX-License-Identifier: Apache-2.0
"""Which samples make a micro-batch, and how micro-batches are fetched and prefetched.

Nothing here remembers a position: consumed samples say everything, so any rank can fetch the
micro-batches of any step.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from megatron_moevement.errors import UserError
from megatron_moevement.runtime.closing import Closing

MicroBatch = dict[str, torch.Tensor]
"""`tokens`, `labels`, `position_ids` (int64) and `loss_mask` (float32) on the host, each
`[micro_batch_size, seq_length]`."""

_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


class SampleDataset(Protocol):
    """Samples by global index; reading is thread-safe."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int, /) -> Mapping[str, torch.Tensor]:
        """One sample: a tensor `[seq_length]` for each key of a micro-batch."""


@dataclasses.dataclass(frozen=True)
class BatchLayout:
    """How the samples of a step are dealt out; sizes in samples or ranks."""

    micro_batch_size: int
    num_microbatches: int
    dp_size: int

    @property
    def global_batch_size(self) -> int:
        """Samples that one step consumes."""
        return self.micro_batch_size * self.num_microbatches * self.dp_size


def sample_indices(
    consumed_samples: int, micro_batch: int, dp_rank: int, dp_size: int, micro_batch_size: int
) -> range:
    """Returns the global indices of one micro-batch of one data-parallel rank.

    The order is that of Megatron-LM's sequential sampler: a micro-batch of all ranks is a run of
    consecutive samples, dealt out in runs of `micro_batch_size`.

    Args:
        consumed_samples: samples of all earlier steps, of all ranks.
        micro_batch: number of the micro-batch within the step, from 0.
        dp_size: data-parallel ranks (Megatron's: expert parallelism included).
    """
    first = consumed_samples + (micro_batch * dp_size + dp_rank) * micro_batch_size
    return range(first, first + micro_batch_size)


class MicroBatches:
    """The micro-batches of one data-parallel rank. Stateless, thread-safe, any rank may hold one.

    Args:
        dataset: the samples of one split; the same on all ranks.
        vocab_size: ids from here on are refused.
    """

    def __init__(
        self, dataset: SampleDataset, layout: BatchLayout, dp_rank: int, vocab_size: int
    ) -> None:
        if not 0 <= dp_rank < layout.dp_size:
            raise ValueError(f"no data-parallel rank of {layout.dp_size}: {dp_rank}")
        self.layout = layout
        self._dataset = dataset
        self._dp_rank = dp_rank
        self._vocab_size = vocab_size

    def fetch(self, consumed_samples: int, micro_batch: int) -> MicroBatch:
        """Returns one micro-batch of the step that starts at `consumed_samples`.

        Raises:
            UserError: the data ends before, or holds an id outside the vocabulary.
        """
        layout = self.layout
        indices = sample_indices(
            consumed_samples, micro_batch, self._dp_rank, layout.dp_size, layout.micro_batch_size
        )
        if indices[-1] >= len(self._dataset):
            raise UserError(
                f"the data set ends at sample {len(self._dataset)}, the step that starts at "
                f"{consumed_samples} needs sample {indices[-1]}; train fewer iterations"
            )
        samples = [self._dataset[index] for index in indices]
        batch = {key: torch.stack([sample[key] for sample in samples]) for key in _KEYS}
        largest = max(int(batch["tokens"].max()), int(batch["labels"].max()))
        if largest >= self._vocab_size:
            raise UserError(
                f"samples {indices[0]} to {indices[-1]} hold the id {largest}, the vocabulary ends "
                f"at {self._vocab_size - 1}; the data was made with another tokenizer"
            )
        return batch

    def step(self, consumed_samples: int) -> list[MicroBatch]:
        """Returns all micro-batches of the step that starts at `consumed_samples`, in order."""
        return [self.fetch(consumed_samples, n) for n in range(self.layout.num_microbatches)]

    def steps(self, consumed_samples: int, num_steps: int, num_workers: int = 0) -> StepIterator:
        """Returns an iterator over the micro-batches of `num_steps` steps; close it.

        Args:
            num_workers: threads that fetch ahead; 0: fetch when asked.
        """
        return StepIterator(self, consumed_samples, num_steps, num_workers)


class StepIterator(Iterator[list[MicroBatch]], Closing):
    """Yields the micro-batches of one step after the other, whatever the number of workers.

    Used by one thread. What fails in a worker is raised where that step is asked for. `close`
    (also called at the end and after an error) leaves no thread behind.
    """

    def __init__(
        self, source: MicroBatches, consumed_samples: int, num_steps: int, num_workers: int
    ) -> None:
        self._source = source
        self._next_sample = consumed_samples
        self._end = consumed_samples + num_steps * source.layout.global_batch_size
        self._pending: deque[Future[MicroBatch]] = deque()
        self._ahead = self._fetches()
        self._pool: ThreadPoolExecutor | None = None
        if num_workers > 0:
            self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="micro-batches")
        # a step more than the one handed out, and work for every thread
        self._lookahead = max(2 * num_workers, source.layout.num_microbatches)

    def __next__(self) -> list[MicroBatch]:
        if self._next_sample >= self._end:
            self.close()
            raise StopIteration
        try:
            batches = self._take() if self._pool else self._source.step(self._next_sample)
        except Exception:
            self.close()
            raise
        self._next_sample += self._source.layout.global_batch_size
        return batches

    def close(self) -> None:
        """Stops the workers and waits for them; the iterator is at its end then."""
        self._end = self._next_sample
        while self._pending:
            self._pending.pop().cancel()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _fetches(self) -> Iterator[tuple[int, int]]:
        """Yields (consumed samples, micro-batch) of every fetch, in order."""
        layout = self._source.layout
        for consumed in range(self._next_sample, self._end, layout.global_batch_size):
            for micro_batch in range(layout.num_microbatches):
                yield consumed, micro_batch

    def _take(self) -> list[MicroBatch]:
        count = self._source.layout.num_microbatches
        self._submit(count)
        batches = [self._pending.popleft().result() for _ in range(count)]
        self._submit(self._lookahead)
        return batches

    def _submit(self, depth: int) -> None:
        assert self._pool is not None
        while len(self._pending) < depth:
            fetch = next(self._ahead, None)
            if fetch is None:
                return
            self._pending.append(self._pool.submit(self._source.fetch, *fetch))
