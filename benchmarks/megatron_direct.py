# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's public API used directly: the yardstick for our loop (see training_loop.py).

Trains the tiny preset on one rank, in FP32: no barrier, no ledger, no reports. Backend, process
groups and batches are the caller's.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core import tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

SEQ, VOCAB, MICRO_BATCH, MICRO_BATCHES, ITERS, LR = 128, 320, 4, 2, 1000, 1e-3


def masked_loss(mask: torch.Tensor, losses: torch.Tensor) -> Any:
    total, tokens = torch.sum(losses.view(-1).float() * mask.view(-1)), mask.sum().to(torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


def forward_step(batches: Iterator[Any], model: torch.nn.Module) -> Any:
    batch = next(batches)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(masked_loss, batch["loss_mask"])


class Direct:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        config = TransformerConfig(
            num_layers=4, hidden_size=128, num_attention_heads=4, ffn_hidden_size=256,
            num_moe_experts=8, moe_ffn_hidden_size=128, moe_router_topk=2, cuda_graph_scope=[],
            moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1e-2,
            moe_token_dispatcher_type="alltoall", normalization="RMSNorm", add_bias_linear=False,
            gated_linear_unit=True, activation_func=torch.nn.functional.silu,
            attention_dropout=0.0, hidden_dropout=0.0, bias_dropout_fusion=False,
            gradient_accumulation_fusion=False, masked_softmax_fusion=False,
            persist_layer_norm=False, bias_activation_fusion=False, apply_rope_fusion=False,
        )  # fmt: skip
        spec = get_gpt_decoder_block_spec(config, False, normalization="RMSNorm")
        model = GPTModel(config, spec, VOCAB, SEQ, position_embedding_type="rope",
                         share_embeddings_and_output_weights=True)  # fmt: skip
        self.model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(lr=LR, min_lr=0.0), [self.model], use_gloo_process_groups=False
        )
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        batch = MICRO_BATCH * MICRO_BATCHES
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, 0.0, LR, 0.0, 0, ITERS * batch, "linear", 0.01, 0.01, 0, "constant"
        )
        assert ps.get_data_parallel_world_size() == 1

    def step(self, batches: list[Any]) -> float:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter(batches), model=self.model,
            num_microbatches=MICRO_BATCHES, seq_length=SEQ, micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )  # fmt: skip
        if self.optimizer.step()[0]:
            self.scheduler.step(increment=MICRO_BATCH * MICRO_BATCHES)
        total = torch.vstack([report["lm loss"] for report in reports]).sum(dim=0)
        return (total[0] / total[1]).item()
