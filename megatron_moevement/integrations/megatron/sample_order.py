# SPDX-License-Identifier: Apache-2.0
"""What decides in which order Megatron-Core's data sets give their samples; nothing is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import MockGPTDataset

from megatron_moevement.integrations.megatron.datasets import (
    DatasetRequest,
    IndexedGptDataset,
    Indices,
    RankLocalBuilder,
    megatron_config,
    without_cache_warnings,
)


@dataclasses.dataclass(frozen=True)
class SampleOrder:
    """What decides which samples of a data set come when, the seed and their length besides.

    Attributes:
        prefix: of the data set; empty for mock data, as is the digest.
        index: digest of its `.idx` file.
        samples: how many are drawn, where that takes more than one epoch: Megatron-Core then
            shuffles all epochs together. Within one epoch a longer run begins with the samples of a
            shorter one.
    """

    prefix: str
    index: str
    samples: int | None


class _Unbuilt:
    """A data set of which only the order of its samples is wanted: it builds no index of them."""

    def _build_document_sample_shuffle_indices(self) -> Indices:
        nothing = np.zeros(1, dtype=np.int64)
        return nothing, nothing, nothing

    @property
    def order(self: Any) -> SampleOrder:
        """What decides the samples."""
        is_one = self._get_num_epochs(self._get_num_tokens_per_epoch()) == 1
        samples = None if is_one else int(self.num_samples)
        if isinstance(self, MockGPTDataset):
            return SampleOrder("", "", samples)
        return SampleOrder(self.dataset.path_prefix, self.dataset.fingerprint, samples)


class _UnbuiltGptDataset(_Unbuilt, IndexedGptDataset):
    pass


class _UnbuiltMockDataset(_Unbuilt, MockGPTDataset):  # type: ignore[misc]
    pass


class _OrderBuilder(RankLocalBuilder):
    """Opens the data sets, and draws no blend of them."""

    def __init__(self, request: DatasetRequest) -> None:
        self.orders: list[SampleOrder] = []
        config = megatron_config(request)
        kind = _UnbuiltMockDataset if config.mock else _UnbuiltGptDataset
        super().__init__(kind, list(request.samples), lambda: True, config)
        self._build_blended_dataset_splits()

    def build_generic_dataset(  # type: ignore[override]
        self,
        kind: Callable[..., Any],
        is_built_on_rank: Callable[[], bool],
        synchronize_ranks: bool,
        *args: Any,
    ) -> Any:
        built = None
        if kind is not BlendedDataset:
            common = (is_built_on_rank, synchronize_ranks, *args)
            built = RankLocalBuilder.build_generic_dataset(kind, *common)
        if isinstance(built, _Unbuilt):
            self.orders.append(built.order)
        return built


def sample_orders(request: DatasetRequest) -> tuple[SampleOrder, ...]:
    """Returns what decides the order of a request's samples, for each of its data sets.

    Reads the indexes and writes nothing.

    Args:
        request: with samples of the train split alone.

    Raises:
        UserError: data are damaged or too small.
    """
    with without_cache_warnings():
        orders = _OrderBuilder(request).orders
    return tuple(sorted(orders, key=lambda one: (one.prefix, one.samples or 0)))
