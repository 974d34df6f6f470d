# SPDX-License-Identifier: Apache-2.0
"""Grouped experts against experts one by one, where some or all of them have no tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.harness.gpu_check.results import Found, Scale
from tests.harness.tiny_job import tiny_job

_SHARES = {
    "even": (0.25, 0.25, 0.25, 0.25),
    "uneven": (0.5, 0.125, 0.3125, 0.0625),
    "some empty": (0.0, 0.75, 0.0, 0.25),
    "all to one": (0.0, 0.0, 1.0, 0.0),
}
_FLAGS = {
    Scale.SMALL: (),
    Scale.FULL: ("--hidden-size=2048", "--moe-ffn-hidden-size=1408", "--num-attention-heads=16"),
}
_ROWS = {Scale.SMALL: 48, Scale.FULL: 8192}
_ROUNDING = 2.0**-7
"""Of BF16, relative to the norm."""
_ROUNDS = 20


def compare(scale: Scale, folder: Path) -> Found:
    """Compares outputs and gradients; an expert without tokens has gradients that are zero."""
    del folder
    with tiny_job("--bf16", "--moe-grouped-gemm", *_FLAGS[scale]) as job:
        chunk = job.chunks[0]
        experts: Any = next(
            one for one in chunk.modules() if type(one).__name__ == "GroupedExperts"
        )
        one_by_one = super(type(experts), experts).forward
        problems = []
        for name, shares in _SHARES.items():
            given = _inputs(experts, shares, _ROWS[scale], job.device)
            grouped = _results(experts, experts, given)
            expected = _results(one_by_one, experts, given)
            problems += [f"{name}: {each}" for each in _unlike(grouped, expected, shares)]
            again = _results(experts, experts, given)
            problems += [
                f"{name}: {key} has other bits when it is computed again"
                for key in grouped
                if not torch.equal(grouped[key], again[key])
            ]
        nothing = _results(experts, experts, _inputs(experts, (0.0,) * 4, 0, job.device))
        problems += [f"no tokens: {key} is not zero" for key, one in nothing.items() if one.any()]
        given = _inputs(experts, _SHARES["uneven"], _ROWS[scale], job.device)
        figures = {
            f"{name}, ms": 1e3 * _seconds(partial(_results, forward, experts, given), job.backend)
            for name, forward in (("grouped", experts), ("one by one", one_by_one))
        }
    return Found(figures | {"rows": _ROWS[scale]}, problems)


def _inputs(
    experts: Any, shares: tuple[float, ...], rows: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Returns rows for the experts, how many each gets, their weights, and output gradients."""
    dtype, hidden = next(experts.parameters()).dtype, experts.config.hidden_size
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    counts = (torch.tensor(shares) * rows).round().long()
    x = drawn(rows, hidden).to(dtype).requires_grad_()
    return x, counts, drawn(rows).abs().requires_grad_(), drawn(rows, hidden).to(dtype)


def _results(
    forward: Callable[..., Any],
    experts: Any,
    given: tuple[torch.Tensor, ...],
) -> dict[str, torch.Tensor]:
    """Returns output and gradients by name."""
    x, counts, probs, grad = given
    output, _ = forward(x, counts, probs)
    wanted = {"rows": x, "probabilities": probs, **dict(experts.named_parameters())}
    grads = torch.autograd.grad(output, list(wanted.values()), grad)
    return {"output": output.detach()} | dict(zip(wanted, grads, strict=True))


def _unlike(
    grouped: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], shares: tuple[float, ...]
) -> list[str]:
    found = []
    for key, one in expected.items():
        distance = (grouped[key].float() - one.float()).norm() / one.float().norm().clamp_min(1e-30)
        if not distance.item() <= _ROUNDING:
            found.append(f"{key} differs by {distance.item():.3g}")
    idle = [number for number, share in enumerate(shares) if not share]
    names = [key for key in grouped if any(key.startswith(f"local_experts.{n}.") for n in idle)]
    return found + [f"{key} is not zero" for key in names if grouped[key].any()]


def _seconds(act: Callable[[], object], backend: Any) -> float:
    act()
    backend.synchronize()
    began_s = time.perf_counter()
    for _ in range(_ROUNDS):
        act()
    backend.synchronize()
    return (time.perf_counter() - began_s) / _ROUNDS
