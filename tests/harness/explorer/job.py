# SPDX-License-Identifier: Apache-2.0
"""A job that the explorer trains: its model, its layout, its training and its protection."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from megatron_moevement.policy.window.ordering import Ordering
from tests.harness.combinations import ALWAYS, DENSE, OF_EXPERTS, SETTINGS
from tests.harness.protected_run import ALWAYS_TRAINED
from tests.harness.random_text import data_flags

HEADS = 4
"""Attention heads of every model."""

NO_ADOPTION = "--moevement-no-adoption"
_DRAWN = ("precision", "optimizer", "dropout", "recompute")
"""Of the settings, those that any model has."""


class Source(Enum):
    """What is trained on."""

    TEXT = "text"
    """Prepared text; no two samples are the same."""
    MOCK = "mock"
    """Megatron's artificial data, which need no file."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of the groups of ranks; `vpp` is 1 without interleaving.

    Attributes:
        pp: pipeline stages.
        tp: tensor peers.
        dp: data-parallel replicas of the dense part.
        ep: expert-parallel ranks, of tensor and data peers together.
        vpp: chunks of a stage.
    """

    pp: int = 1
    tp: int = 1
    dp: int = 1
    ep: int = 1
    vpp: int = 1

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return self.pp * self.tp * self.dp

    @property
    def name(self) -> str:
        """As in pp2-dp2-ep2."""
        sizes = dataclasses.asdict(self).items()
        return "-".join(f"{name}{size}" for name, size in sizes if size > 1) or "alone"


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of the network.

    Attributes:
        layers_per_chunk: of every chunk of every stage.
        more_layers: that the last stage has besides.
        hidden: width of the residual stream.
        ffn: width of the dense MLP.
        expert_ffn: width of an expert.
        experts: of a layer; 0 without any.
        topk: experts of a token.
        every: each so many layers are MoE layers.
        shared: width of the shared experts; 0 without.
        vocabulary: rows of the embedding.
        sequence: tokens of a sample.
        tied: whether the output layer is the embedding.
    """

    layers_per_chunk: int = 1
    more_layers: int = 0
    hidden: int = 32
    ffn: int = 64
    expert_ffn: int = 32
    experts: int = 4
    topk: int = 2
    every: int = 1
    shared: int = 0
    vocabulary: int = 320
    sequence: int = 16
    tied: bool = False


@dataclasses.dataclass(frozen=True)
class Training:
    """How it is trained; names are those of `combinations.SETTINGS`.

    Attributes:
        steps: of the run.
        micro: samples of a micro-batch.
        passes: micro-batches of a step.
        precision: compute type.
        optimizer: replicated or distributed, overlapped or not.
        bucket: parameters of a bucket; 0: upstream's.
        experts: sequential or grouped.
        balance: of the router.
        dropout: whether there is any.
        z_loss: whether there is one.
        dispatcher: of tokens.
        recompute: what backward computes again.
        evaluate_every: steps; 0: never.
        save_every: steps; 0: at the end only.
        saves_beside: whether saves are written beside training.
        loads: whether a launch loads what was saved.
        source: of the samples.
    """

    steps: int = 16
    micro: int = 1
    passes: int = 2
    precision: str = "fp32"
    optimizer: str = "replicated"
    bucket: int = 0
    experts: str = "sequential"
    balance: str = "aux"
    dropout: str = "no-dropout"
    z_loss: str = "no-z-loss"
    dispatcher: str = "alltoall"
    recompute: str = "stored"
    evaluate_every: int = 0
    save_every: int = 0
    # Not in the text that other draws are seeded by: the seeds of --without stay.
    saves_beside: bool = dataclasses.field(default=False, repr=False)
    loads: bool = True
    source: Source = Source.MOCK


@dataclasses.dataclass(frozen=True)
class Protection:
    """How it is protected.

    Attributes:
        window: W, or the largest one of a job that chooses its own.
        bandwidths: seed of what a job measures that chooses its own W; 0: W stays.
        order: of experts in a window.
        replicas: r.
        copies_state: whether a lost state is copied from replicas where there are any.
        skips_frozen: whether a replay leaves out weight gradients of frozen operators.
        logs: whether there is an upstream log.
        adopts: whether who takes the place of a dead process takes over what that one left.
        domain: processes of a failure domain.
        tier_interval: every so many persisted windows are written to a tier; 0: none.
        tiers_by_url: whether they go through fsspec.
    """

    window: int = 4
    bandwidths: int = 0
    order: str = Ordering.INDEX.value
    replicas: int = 1
    copies_state: bool = True
    skips_frozen: bool = True
    logs: bool = True
    adopts: bool = True
    domain: int = 1
    # Not in the text that other draws are seeded by, as above.
    tier_interval: int = dataclasses.field(default=0, repr=False)
    tiers_by_url: bool = dataclasses.field(default=False, repr=False)

    @property
    def surrounding_flags(self) -> tuple[str, ...]:
        """What puts processes into failure domains, and what they measure: no training flags."""
        domain = (f"--domain-size={self.domain}",) if self.domain > 1 else ()
        measured = (f"--bandwidths={self.bandwidths}",) if self.bandwidths else ()
        return (*domain, *measured)

    @property
    def window_flags(self) -> tuple[str, ...]:
        """What decides about W."""
        if self.bandwidths:
            return ("--moevement-window=auto", f"--moevement-max-window={self.window}")
        return (f"--moevement-window={self.window}",)


@dataclasses.dataclass(frozen=True)
class DrawnJob:
    """All of it."""

    layout: Layout = Layout()
    model: Model = Model()
    training: Training = Training()
    protection: Protection = Protection()

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return (
            self.layout.pp * self.layout.vpp * self.model.layers_per_chunk + self.model.more_layers
        )

    @property
    def copies(self) -> int:
        """Copies of each slot: no two of them, nor the original, in one failure domain."""
        domains = -(-self.layout.ranks // self.protection.domain)
        return min(self.protection.replicas, domains - 1)

    @property
    def protected_from(self) -> int:
        """A step whose commit means that a window is persisted: the ring has no more room."""
        return 2 * self.protection.window + 1

    def training_flags(self, text: Path) -> tuple[str, ...]:
        """Returns the flags that decide bits; saving, protection and paths are not among them.

        Args:
            text: prefix of prepared text.
        """
        return (
            *(ALWAYS if self.model.experts else DENSE),
            *ALWAYS_TRAINED,
            *self._model_flags(),
            *self._layout_flags(),
            *self._training_flags(),
            *self._data_flags(text),
        )

    def protection_flags(self) -> tuple[str, ...]:
        """Returns the flags of its protection, places and faults excepted."""
        protection = self.protection
        flags = [
            "--moevement-strategy=moevement",
            *protection.window_flags,
            f"--moevement-order={protection.order}",
            f"--moevement-replicas={protection.replicas}",
        ]
        flags += [] if protection.copies_state else ["--moevement-no-replica-copy"]
        flags += [] if protection.skips_frozen else ["--moevement-no-frozen-skip"]
        flags += [] if protection.logs else ["--moevement-no-upstream-log"]
        flags += [] if protection.adopts else [NO_ADOPTION]
        return tuple(flags)

    def tier_flags(self, folder: Path) -> tuple[str, ...]:
        """Returns the flags of its tiers.

        Args:
            folder: theirs.
        """
        protection = self.protection
        if not protection.tier_interval:
            return ()
        place = folder.absolute().as_uri() if protection.tiers_by_url else folder
        interval = f"--moevement-tier-interval={protection.tier_interval}"
        return (f"--moevement-tier-dir={place}", interval)

    def saving_flags(self, folder: Path) -> tuple[str, ...]:
        """Returns the flags of its durable checkpoints.

        Args:
            folder: theirs.
        """
        flags = [f"--save={folder}"]
        flags += [f"--save-interval={self.training.save_every}"] if self.training.save_every else []
        flags += ["--async-save"] if self.training.saves_beside else []
        flags += [f"--load={folder}"] if self.training.loads else []
        return tuple(flags)

    def _model_flags(self) -> Iterator[str]:
        model = self.model
        yield f"--num-layers={self.layers}"
        yield f"--hidden-size={model.hidden}"
        yield f"--ffn-hidden-size={model.ffn}"
        yield f"--seq-length={model.sequence}"
        if not model.tied:
            yield "--untie-embeddings-and-output-weights"
        if model.experts:
            yield from self._expert_flags()

    def _expert_flags(self) -> Iterator[str]:
        model = self.model
        yield f"--moe-ffn-hidden-size={model.expert_ffn}"
        yield f"--num-experts={model.experts}"
        yield f"--moe-router-topk={model.topk}"
        yield f"--moe-layer-freq={model.every}"
        if model.topk == 1 and self.training.balance != "bias":  # upstream demands it
            yield "--moe-router-pre-softmax"
        if model.shared:
            yield f"--moe-shared-expert-intermediate-size={model.shared}"

    def _layout_flags(self) -> Iterator[str]:
        layout = self.layout
        yield f"--pipeline-model-parallel-size={layout.pp}"
        yield f"--expert-model-parallel-size={layout.ep}"
        if layout.tp > 1:
            yield f"--tensor-model-parallel-size={layout.tp}"
            yield "--sequence-parallel"
            if self.model.experts:
                yield "--expert-tensor-parallel-size=1"
        if layout.vpp > 1:
            yield f"--num-virtual-stages-per-pipeline-rank={layout.vpp}"
        if self.model.more_layers:
            last = self.model.layers_per_chunk * layout.vpp + self.model.more_layers
            yield f"--decoder-last-pipeline-num-layers={last}"

    def _training_flags(self) -> Iterator[str]:
        training = self.training
        yield f"--train-iters={training.steps}"
        yield f"--micro-batch-size={training.micro}"
        yield f"--global-batch-size={training.micro * training.passes * self.layout.dp}"
        for name in (*_DRAWN, *(OF_EXPERTS if self.model.experts else ())):
            yield from SETTINGS[name][getattr(training, name.replace("-", "_"))].split()
        if training.bucket:
            yield f"--ddp-bucket-size={training.bucket}"
        if training.evaluate_every:
            yield "--eval-iters=1"
            yield f"--eval-interval={training.evaluate_every}"

    def _data_flags(self, text: Path) -> tuple[str, ...]:
        vocabulary = self.model.vocabulary
        rows = f"--make-vocab-size-divisible-by={vocabulary}"
        if self.training.source is Source.TEXT:
            return (*data_flags(text), rows)
        words = f"--vocab-size={vocabulary - 1}"  # and one that ends a document
        return ("--mock-data", "--tokenizer-type=NullTokenizer", words, rows)
