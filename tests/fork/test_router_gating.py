"""What the patch of the router's linear layer is for."""

import importlib
import importlib.util
import sys

import torch


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
