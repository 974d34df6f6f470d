# SPDX-License-Identifier: Apache-2.0
"""What the patch of the router's linear layer is for."""

import importlib
import importlib.util
import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def import_without_transformer_engine(name, monkeypatch):
    """Returns a second copy of a module, imported as if TransformerEngine were missing."""
    spec = importlib.util.find_spec(name)
    importlib.import_module(name)  # with all that it imports, which keeps TransformerEngine
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_router_runs_without_transformer_engine(monkeypatch):
    name = "megatron.core.transformer.moe.moe_utils"
    moe_utils = import_without_transformer_engine(name, monkeypatch)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(3, 2, 8, generator=generator, requires_grad=True)
    weight = torch.randn(4, 8, generator=generator, requires_grad=True)
    logits = moe_utils.router_gating_linear(tokens, weight, None, torch.float32)
    gradient = torch.randn(3, 2, 4, generator=generator)
    logits.backward(gradient)
    rows, flat = tokens.detach().view(-1, 8), gradient.view(-1, 4)
    assert torch.equal(logits.detach().view(-1, 4), torch.mm(rows, weight.detach().t()))
    assert torch.equal(tokens.grad.view(-1, 8), torch.mm(flat, weight.detach()))
    assert torch.equal(weight.grad, torch.mm(flat.t(), rows))


class CountProducts(TorchDispatchMode):
    """Counts the matrix products that are computed."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def test_a_gate_computes_only_the_gradients_that_are_needed(monkeypatch):
    name = "megatron.core.transformer.moe.moe_utils"
    moe_utils = import_without_transformer_engine(name, monkeypatch)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(3, 2, 8, generator=generator)
    weight = torch.randn(4, 8, generator=generator)
    gradient = torch.randn(3, 2, 4, generator=generator)
    seen = {}
    for needed in ("tokens", "weight", "both"):
        inputs = [tokens.clone(), weight.clone()]
        for index, one in enumerate(("tokens", "weight")):
            inputs[index].requires_grad_(needed in (one, "both"))
        logits = moe_utils.router_gating_linear(*inputs, None, torch.float32)
        with CountProducts() as products:
            logits.backward(gradient)
        seen[needed] = (products.count, *(one.grad for one in inputs))
    count, both_tokens, both_weight = seen["both"]
    assert count == 2
    count, only_tokens, none = seen["tokens"]
    assert (count, none) == (1, None)
    assert torch.equal(only_tokens, both_tokens)
    count, none, only_weight = seen["weight"]
    assert (count, none) == (1, None)
    assert torch.equal(only_weight, both_weight)
