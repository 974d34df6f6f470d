# SPDX-License-Identifier: Apache-2.0
"""Flags of Megatron-LM that are no settings here, as data: what becomes of each.

A flag says what is the case anyway, has no effect here, or asks for a feature that is not covered.
A flag can be in several tables: `--context-parallel-size 1` is the case, 2 asks for a feature. A
name that ends in a hyphen stands for all flags that begin so, and `--no-` for `--disable-`, too.
What fields of `TransformerConfig` are by default is the case, without a table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ALIASES: Mapping[str, tuple[str, ...]] = {
    "--recompute-activations": ("--recompute-granularity", "selective"),
    "--moe-layer-recompute": ("--recompute-granularity=selective", "--recompute-modules=moe"),
    "--use-checkpoint-opt_param-scheduler": ("--use-checkpoint-opt-param-scheduler",),
    "--override-opt_param-scheduler": ("--override-opt-param-scheduler",),
    "--use-rotary-position-embeddings": ("--position-embedding-type", "rope"),
    "--persistent-save-interval": ("--save-interval",),
    "--encoder-seq-length": ("--seq-length",),
}
"""Other words for flags that are settings here."""

AS_IT_IS: Mapping[str, tuple[str, ...]] = {
    "--use-mcore-models": ("",),
    "--distributed-backend": ("nccl",),  # on a GPU; hosts have gloo
    "--num-distributed-optimizer-instances": ("1",),
    "--data-parallel-sharding-strategy": ("no_shard",),
    "--no-create-attention-mask-in-dataloader": ("",),
    "--dataloader-type": ("single",),
    "--mid-level-dataset-surplus": ("0.005",),
    "--outer-dp-sharding-strategy": ("no_shard",),
    "--pipeline-model-parallel-comm-backend": ("nccl",),
    "--rope-type": ("rope",),
    "--mtp-num-layers": ("0",),
    "--hybrid-attention-ratio": ("0.0", "0"),
    "--hybrid-mlp-ratio": ("0.0", "0"),
    "--no-manual-gc-eval": ("",),
    "--tokenizer-hf-use-fast": ("",),
    "--vocab-extra-ids": ("0",),
    "--exit-signal": ("SIGTERM",),
    "--no-bias-gelu-fusion": ("",),
    "--rotary-seq-len-interpolation-factor": ("1",),
    "--auto-detect-ckpt-format": ("",),
    "--use-dist-ckpt": ("",),
    "--dist-ckpt-format": ("torch_dist",),
    "--exit-signal-handler": ("",),
    "--no-gloo-process-groups": ("",),
    "--main-grads-dtype": ("fp32",),
    "--main-params-dtype": ("fp32",),
    "--exp-avg-dtype": ("fp32",),
    "--exp-avg-sq-dtype": ("fp32",),
}
"""By flag the values that say what is the case; "" is the flag without a value."""

WITHOUT_EFFECT = _words(
    """--use-flash-attn --enable-experimental --no-check-for-nan-in-loss-and-grad
    --no-check-for-nan-in-loss --check-for-spiky-loss
    --check-for-large-grads --rerun-mode --dist-ckpt-strictness --ckpt-fully-parallel-save
    --no-ckpt-fully-parallel-save --ckpt-fully-parallel-load --ckpt-assume-constant-structure
    --dist-ckpt-optim-fully-reshardable --distrib-optim-fully-reshardable-mem-efficient
    --dist-ckpt-save-pre-mcore-014 --no-strict-fsdp-dtensor-load --use-persistent-ckpt-worker
    --save-wgrads-interval --save-dgrads-interval --no-save-tokenizer-assets
    --no-use-tokenizer-model-from-checkpoint-args --no-msc --log-straggler
    --no-straggler-on-startup --straggler-ctrlr-port --straggler-minmax-count
    --enable-one-logger --no-one-logger --one-logger- --app-tag-run-name --app-tag-run-version
    --run-workload-inspector-server --enable-gloo-process-groups --no-position-embedding
    --high-priority-stream-groups --distributed-timeout-seconds-after-init --local-rank
    --lazy-mpu-init --no-align-grad-reduce --no-align-param-gather
    --no-gradient-reduce-div-fusion --no-scatter-gather-tensors-in-pipeline --moe-extended-tp
    --no-async-tensor-model-parallel-allreduce --no-clone-scatter-output-in-embedding
    --onnx-safe --log-energy --log-max-attention-logit --log-throughput-to-tensorboard
    --log-l2-norm-grad-to-tensorboard --log-runtime-to-tensorboard --runtime-time-unit
    --throughput-window-size --memory-keys --no-barrier-with-level-1-timing --no-filter-warnings
    --modules-to-filter --set-level-for-all-loggers --save-config-filepath --config-logger-dir
    --dump-param-to-param-group-map
    --record-memory-history --memory-snapshot-path --record-shapes --nvtx-ranges
    --empty-unused-memory-level --train-sync-interval
    --check-weight-hash-across-dp-replicas-interval --exit-signal-handler-for-dataloader
    --adlr-autoresume --adlr-autoresume-interval --trust-remote-code
    --tokenizer-hf-include-special-tokens
    --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap --sample-rate --mask-prob
    --short-seq-prob --sgd-momentum --inference- --max-tokens-to-oom --use-legacy-static-engine
    --decode-only-cuda-graphs --nccl-all-reduce-for-prefill --enable-chunked-prefill
    --no-chunked-prefill --flash-decode --mlp-chunks-for-prefill
    --moe-pad-experts-for-cuda-graph-inference"""
)
"""Flags that choose between ways to the same result, or for what does not exist here."""


@dataclasses.dataclass(frozen=True)
class Feature:
    """What is not covered.

    Attributes:
        reason: why not, or what there is instead.
        flags: that ask for it, but for the values that say what is the case.
        tuning: that have an effect only where something else asks for it.
        values: by a flag that is a setting here, those that ask for it.
    """

    reason: str
    flags: str = ""
    tuning: str = ""
    values: Mapping[str, str] = dataclasses.field(default_factory=dict)


FEATURES: Mapping[str, Feature] = {
    "multi-latent attention": Feature(
        "latent attention is not covered yet",
        "--multi-latent-attention",
        values={"--recompute-modules": "mla_up_proj"},
    ),
    "multi-token prediction": Feature(
        "it is not covered by the inventory yet",
        "--mtp-",
        tuning="--mtp-loss-scaling-factor",
    ),
    "context parallelism": Feature(
        "it is not covered yet",
        """--context-parallel-size --context-parallel- --hierarchical-context-
        --hybrid-context- --max-seqlen-per-dp-cp-""",
        tuning="--cp-comm-",
    ),
    "flexible token dispatcher": Feature(
        "DeepEP and HybridEP are not covered yet",
        "--moe-enable-deepep",
        tuning="--moe-flex- --moe-deepep- --moe-hybridep-",
        values={"--moe-token-dispatcher-type": "flex"},
    ),
    "expert-parallel overlap": Feature(
        "its schedule interleaves micro-batches, which the boundary log can't name",
        "--overlap-moe-expert- --ep-overlap-",
    ),
    "shared-expert overlap": Feature(
        "it computes on a stream that no commit waits for",
        "--moe-shared-expert-overlap",
    ),
    "delayed weight gradients": Feature(
        "they would be computed after the commit barrier",
        "--delay-wgrad- --defer-embedding- --wgrad-deferral-",
    ),
    "CUDA graphs": Feature(
        "a captured graph can't skip frozen operators",
        "--enable-cuda-graph --external-cuda-graph --cuda-graph-",
        tuning="--cuda-graph-scope --cuda-graph-warmup-steps",
    ),
    "FP8 and FP4": Feature(
        "their scales are not covered by the inventory",
        """--fp8- --fp4- --first-last-layers-bf16 --num-layers-at- --moe-router-padding-
        --reuse-grad-buf-for-mxfp8- --keep-fp8-transpose-cache --te-precision-config-file
        --kitchen- --use-kitchen-""",
        tuning="""--fp8-margin --fp8-interval --fp8-amax-history-len --fp8-amax-compute-algo
        --fp8-recipe --fp4-recipe --no-fp8-wgrad --num-layers-at-""",
    ),
    "precision-aware optimizer": Feature(
        "its state is not covered by the inventory",
        "--use-precision-aware-optimizer --main-grads-dtype --main-params-dtype --exp-avg-",
    ),
    "optimizer offloading": Feature(
        "its optimizer state is not covered by the inventory",
        "--optimizer-cpu-offload",
        tuning="""--optimizer-offload- --overlap-cpu-optimizer- --no-pin-cpu-
        --use-torch-optimizer-for-cpu-offload""",
    ),
    "activation offloading": Feature(
        "copies in flight are not covered yet",
        """--fine-grained-activation-offloading --offload-modules --min-offloaded-
        --cpu-offloading --cpu-offloading- --distribute-saved-activations""",
    ),
    "FSDP": Feature(
        "its sharding is not covered by the inventory",
        """--use-megatron-fsdp --megatron-fsdp- --use-custom-fsdp --use-torch-fsdp2 --torch-fsdp2-
        --fsdp- --data-parallel-sharding-strategy --outer-dp-sharding-strategy
        --suggested-communication-unit-size --enable-full-sharding-in-hsdp
        --create-all-gather-group""",
    ),
    "several optimizer instances": Feature(
        "they are not covered yet",
        "--num-distributed-optimizer-instances",
    ),
    "tensor-parallel overlap": Feature(
        "its user buffers are not covered by a restart",
        "--tp-comm-overlap",
        tuning="--tp-comm-",
    ),
    "user buffers and reductions in the network": Feature(
        "a restart would not register them again",
        """--use-nccl-ub --no-symmetric-registration --use-sharp --sharp-enabled-group
        --symmetric-ar-type --nccl-communicator-config-path""",
    ),
    "gradient buckets": Feature(
        "they are as Megatron's defaults make them",
        "--ddp-",
    ),
    "other collectives": Feature(
        "they are NCCL's on GPUs and gloo's on hosts",
        "--distributed-backend --pipeline-model-parallel-comm-backend --fake-process-group",
    ),
    "rank order": Feature(
        "stages are taken to be consecutive ranks",
        "--use-tp-pp-dp-mapping",
    ),
    "order of overlapped messages": Feature(
        "it is not covered yet",
        """--overlap-p2p-communication-warmup-flush --microbatch-group-size-per-
        --use-ring-exchange-p2p --overlap-param-gather-with-optimizer-step""",
    ),
    "linear, gated and sparse attention": Feature(
        "its state is not covered by the inventory yet",
        """--linear- --use-gated-attention --attention-output-gate
        --experimental-attention-variant --dsa-""",
    ),
    "sliding windows": Feature(
        "a window is not covered yet",
        "--window-size --window-attn-skip-freq",
    ),
    "other softmax of attention": Feature(
        "sinks, clipping and norms of it are not covered yet",
        "--softmax-type --qk-clip --qk-clip- --qk-l2-norm",
    ),
    "other activation functions": Feature(
        "they are GELU, SwiGLU and squared ReLU",
        """--openai-gelu --quick-geglu --glu-linear-offset --activation-func-clamp-value
        --use-te-activation-func --use-fused-weighted-squared-relu""",
    ),
    "zero-centered norms": Feature(
        "local norms have none",
        "--apply-layernorm-1p",
    ),
    "other residual connections": Feature(
        "they are of the compute type, before the norms",
        """--fp32-residual-connection --apply-residual-connection-post-layernorm
        --enable-mhc-connections""",
        tuning="--mhc-",
    ),
    "rotary interpolation": Feature(
        "it is not covered yet",
        "--rotary-seq-len-interpolation-factor --use-rope-scaling --rope-type",
        tuning="--rope-scaling-factor",
    ),
    "other positions": Feature(
        "they are learned, rotary in all layers, or none",
        "--no-rope-freq",
        tuning="--relative-attention- --mrope-section",
        values={"--position-embedding-type": "mrope relative"},
    ),
    "other kinds of models": Feature(
        "the inventory has the modules of a GPT alone",
        """--spec --use-legacy-models --is-hybrid-model --hybrid- --mamba- --use-mamba-
        --heterogeneous- --encoder-num-layers --decoder-num-layers --decoder-seq-length --bert-
        --output-bert-embeddings --ict- --retriever- --embedding-path --block-data-path
        --evidence-data-path --titles-data-path --use-one-sent-docs --no-data-sharding""",
        tuning="""--bert-embedder-type --biencoder- --indexer- --query-in-block-prob --vision-
        --num-classes --num-channels --img-h --img-w --patch-dim --dino- --swin- --mask-type
        --mask-factor --head-lr-mult --iter-per-epoch --classes-fraction
        --data-per-class-fraction""",
    ),
    "other experts": Feature(
        "they are as wide as the layer, and their gates act on their output",
        """--moe-latent-size --moe-apply-probs-on-input --moe-use-legacy-grouped-gemm
        --moe-use-upcycling""",
        tuning="--moe-upcycling-granularity",
    ),
    "forced routing": Feature(
        "random and replayed routing is for benchmarks alone",
        "--moe-router-force- --moe-enable-routing-replay",
    ),
    "other initial weights": Feature(
        "they are drawn where they are trained, from --seed",
        """--init-method-xavier-uniform --use-cpu-initialization --no-initialization
        --data-parallel-random-init --init-model-with-meta-device""",
    ),
    "weight decay conditions": Feature(
        "which parameters decay is decided by shape here",
        "--no-weight-decay-cond-type --apply-wd-to-qk-layernorm",
    ),
    "decoupled learning rate": Feature(
        "all parameters have one",
        "--decoupled-lr --decoupled-min-lr",
    ),
    "other optimizer": Feature(
        "the optimizer is Adam",
        tuning="--muon-",
        values={"--optimizer": "sgd muon dist_muon"},
    ),
    "gradients in BF16": Feature(
        "with --bf16 they are accumulated and reduced in FP32",
        "--grad-reduce-in-bf16",
    ),
    "loss in FP16": Feature(
        "it is computed in FP32",
        "--fp16-lm-cross-entropy",
    ),
    "loss per token": Feature(
        "its extra reductions are not in the ledger yet",
        "--calculate-per-token-loss",
    ),
    "other kernels": Feature(
        "which of them torch chooses and fuses has no switch here",
        "--no-jit-fuser --batch-invariant-mode --no-bf16-reduced-precision-matmul",
    ),
    "random tracker of TransformerEngine": Feature(
        "its streams are not among the captured ones",
        "--te-rng-tracker --inference-rng-tracker",
    ),
    "growing batch size": Feature(
        "a batch size that grows moves the data cursor of a replay",
        "--rampup-batch-size --decrease-batch-size-if-needed --step-batch-size-schedule",
    ),
    "skipped iterations": Feature(
        "the data cursor moves with every step",
        "--iterations-to-skip --result-rejected-tracker-filename",
    ),
    "evaluation alone": Feature(
        "this program trains; an evaluation is --eval-iters long",
        "--skip-train --test-mode --full-validation --multiple-validation-sets",
    ),
    "errors on purpose": Feature(
        "--moevement-faults injects faults",
        "--error-injection- --fault-injector-",
    ),
    "other exit signals": Feature(
        "a job saves and exits at SIGTERM",
        "--exit-signal",
    ),
    "local checkpoints": Feature(
        "--moevement-strategy keeps snapshots in memory instead",
        "--non-persistent- --replication --replication-",
    ),
    "other checkpoint format": Feature(
        "checkpoints are torch_dist",
        "--dist-ckpt-format --ckpt-convert- --load-main-params-from-ckpt",
        values={"--ckpt-format": "torch torch_dcp fsdp_dtensor zarr"},
    ),
    "pretrained checkpoint": Feature(
        "give it by --load, with --finetune",
        "--pretrained-checkpoint",
    ),
    "layout of a checkpoint": Feature(
        "give it as flags; checkpoints are loaded in any layout",
        "--use-mp-args-from-checkpoint-args",
    ),
    "padded vocabulary": Feature(
        "it follows from the tokenizer, --vocab-size and --make-vocab-size-divisible-by",
        "--padded-vocab-size",
    ),
    "other tokenizer": Feature(
        "--help lists those that read their files",
        """--legacy-tokenizer --tokenizer-sentencepiece-legacy --tokenizer-metadata
        --tokenizer-special-tokens --vocab-extra-ids""",
        values={
            "--tokenizer-type": "MultimodalTokenizer NullMultimodalTokenizer "
            "SFTTokenizer BertWordPieceLowerCase BertWordPieceCase"
        },
    ),
    "other order of samples": Feature(
        "it is that of Megatron's GPT data sets",
        "--dataloader-type --phase-transition-iterations --mid-level-dataset-surplus",
    ),
    "other data": Feature(
        "data are prefixes on the command line",
        """--data-args-path --per-split-data-args-path --per-dataset-sequences-path
        --object-storage-cache-path --allow-ambiguous-pad-tokens --fim-data""",
        tuning="--fim-",
    ),
    "other training": Feature(
        "it is pretraining on text",
        "--sft --perform-rl-step",
        tuning="--sft- --rl- --grpo- --langrl- --refit-method",
    ),
    "flags that Megatron-LM has removed": Feature(
        "--micro-batch-size, --lr-warmup-fraction, --tensor-model-parallel-size and "
        "--recompute-granularity took their place",
        "--batch-size --warmup --model-parallel-size --checkpoint-activations",
    ),
}
"""By name what is not covered; a message lists them in this order."""
