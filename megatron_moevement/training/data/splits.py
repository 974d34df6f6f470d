# SPDX-License-Identifier: Apache-2.0
"""The train, validation and test data sets that a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_moevement.integrations.megatron.datasets import (
    Blend as MegatronBlend,
)
from megatron_moevement.integrations.megatron.datasets import (
    DatasetRequest,
    Datasets,
    IndexRole,
    SampleCounts,
    build_datasets,
)
from megatron_moevement.integrations.megatron.sample_order import sample_orders
from megatron_moevement.training.data.arguments import (
    Blend,
    BlendPerSplit,
    DataConfig,
    OneBlend,
    data_prefixes,
)
from megatron_moevement.training.data.content import tokens_digest


def count_samples(
    *, train_iters: int, eval_interval: int, eval_iters: int, global_batch_size: int
) -> SampleCounts:
    """Returns how many samples a run draws, as Megatron-LM counts them.

    Validation runs every `eval_interval` iterations and once in the end, each time over
    `eval_iters` iterations; the test split is evaluated once.
    """
    evaluations = train_iters // eval_interval + 1
    return SampleCounts(
        train=train_iters * global_batch_size,
        valid=evaluations * eval_iters * global_batch_size,
        test=eval_iters * global_batch_size,
    )


def build_splits(
    config: DataConfig,
    samples: SampleCounts,
    *,
    seed: int,
    role: IndexRole = IndexRole.BUILDER,
    barrier: Callable[[], None] = lambda: None,
) -> Datasets:
    """Builds the data sets; the same on every rank, with or without a process group.

    Args:
        samples: samples of each split; 0: that split is not built.
        seed: decides the order, together with `samples`.
        role: BUILDER on one rank of each node, READER on the others.
        barrier: joins the ranks of a node; called once.

    Raises:
        UserError: see `integrations.megatron.datasets.build_datasets`.
    """
    return build_datasets(_request(config, samples, seed), role, barrier)


def training_data(config: DataConfig, train_samples: int, *, seed: int) -> dict[str, Any]:
    """Returns what decides the training samples and their order, seed and sizes besides.

    Neither paths nor what else is drawn from the data decide any of them.

    Raises:
        UserError: data are damaged or too small.
        OSError: a file can't be read.
    """
    samples = SampleCounts(train=train_samples, valid=0, test=0)
    orders = sample_orders(_request(config, samples, seed))
    source = config.source
    train: tuple[float, ...] = ()
    if isinstance(source, OneBlend):
        train = (source.shares[0] / sum(source.shares),)
    blend = source.blend if isinstance(source, OneBlend) else getattr(source, "train", None)
    place = {prefix: number for number, prefix in enumerate(data_prefixes(source))}
    return {
        "share": train,
        "weights": None if blend is None else _normalized(blend),
        "sets": [
            {
                "index": one.index,
                "tokens": tokens_digest(one.prefix) if one.prefix else "mock",
                "epochs": "one" if one.samples is None else f"those of {one.samples} samples",
            }
            for one in sorted(orders, key=lambda each: place.get(each.prefix, 0))
        ],
    }


def _normalized(blend: Blend) -> list[float] | None:
    if blend.weights is None:
        return None
    return [weight / sum(blend.weights) for weight in blend.weights]


def _request(config: DataConfig, samples: SampleCounts, seed: int) -> DatasetRequest:
    source, flags = config.source, config.flags
    one = source if isinstance(source, OneBlend) else None
    apart = source if isinstance(source, BlendPerSplit) else None
    return DatasetRequest(
        samples=samples,
        seq_length=config.seq_length,
        seed=seed,
        tokenizer=config.tokenizer,
        blend=_pair(one.blend) if one else None,
        split=one.shares if one else None,
        blend_per_split=(_pair(apart.train), _pair(apart.valid), _pair(apart.test))
        if apart
        else None,
        index_cache_path=flags.data_cache_path,
        mmap_bin_files=flags.mmap_bin_files,
        reset_position_ids=flags.reset_position_ids,
        eod_mask_loss=flags.eod_mask_loss,
        builder_threads=flags.num_dataset_builder_threads,
    )


def _pair(blend: Blend | None) -> MegatronBlend | None:
    return None if blend is None else (blend.prefixes, blend.weights)
