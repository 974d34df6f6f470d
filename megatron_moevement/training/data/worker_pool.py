# SPDX-License-Identifier: Apache-2.0
"""The worker processes of `moevement data prepare`.

A module of its own, because a worker imports the module of the function it runs: this one brings
in neither torch nor Megatron-Core, so workers start fast and stay small.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor

from megatron_moevement.training.data.documents import (
    Piece,
    Reading,
    TokenizedBatch,
    tokenize_batch,
)
from megatron_moevement.training.data.tokenizers import Tokenizer


def tokenized_batches(
    tokenizer: Tokenizer, reading: Reading, batches: Sequence[tuple[Piece, ...]], workers: int
) -> Iterator[TokenizedBatch]:
    """Yields the tokenized batches in order; closing the iterator ends the workers.

    Args:
        tokenizer: used here when one worker is enough.
        workers: processes at most; 1: none but this one.

    Raises:
        UserError: see `tokenize_batch`.
        BrokenProcessPool: a worker died.
    """
    workers = min(workers, len(batches))
    if workers <= 1:
        yield from (tokenize_batch(tokenizer, reading, batch) for batch in batches)
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_Worker.start,
        initargs=(reading,),
    )
    remaining = iter(batches)
    pending: deque[Future[TokenizedBatch]] = deque()
    try:
        while True:
            while len(pending) < 2 * workers and (batch := next(remaining, None)) is not None:
                pending.append(pool.submit(_Worker.run, batch))
            if not pending:
                return
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Worker:
    """A worker process: keeps its tokenizer, ends with its parent."""

    reading: Reading
    tokenizer: Tokenizer

    @classmethod
    def start(cls, reading: Reading) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
        threading.Thread(target=_end_with_parent, daemon=True).start()
        cls.reading = reading
        cls.tokenizer = reading.tokenizer.build()

    @classmethod
    def run(cls, batch: Sequence[Piece]) -> TokenizedBatch:
        return tokenize_batch(cls.tokenizer, cls.reading, batch)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
