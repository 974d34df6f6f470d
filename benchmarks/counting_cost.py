# SPDX-License-Identifier: Apache-2.0
"""What counting tokens per expert costs a rank of the job of benchmarks/overhead.py in a step.

    .venv/bin/python benchmarks/counting_cost.py

One process calls routers of four layers for four micro-batches of 512 tokens, with the hooks of
production and without them, in turns, and commits the step. The routers return what was drawn
before, so that nothing else is computed. CPU time of the process, medians of steps; once a window
all ranks add up their counts, which is not in it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import torch

from megatron_moevement.backends.backend import choose, load

load(choose(None)).install()  # before Megatron is imported

from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402

from megatron_moevement.integrations.megatron.router_counts import RouterCounts  # noqa: E402
from megatron_moevement.policy.window.ordering import Ordering  # noqa: E402

WINDOW = 4
LAYERS, EXPERTS, TOP_K = 8, 8, 2
OWN_LAYERS = LAYERS // 2
"""Of a rank: its stage has half of all layers."""
MICRO_BATCHES, TOKENS = 4, 2 * 256
COUNTED = (Ordering.HARD, Ordering.SOFT, Ordering.DECAYED, Ordering.CAPACITY)


class DrawnRouter(TopKRouter):  # type: ignore[misc]
    """A router that returns the same choice at each call."""

    def __init__(self, layer: int) -> None:
        torch.nn.Module.__init__(self)  # nothing of the real one is needed
        self.layer_number = layer + 1
        chosen = torch.rand(TOKENS, EXPERTS).topk(TOP_K, dim=1).indices
        self._map = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, chosen, True)
        self._probabilities = self._map * torch.rand(TOKENS, EXPERTS)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._probabilities, self._map


def counts_of(routers: torch.nn.Module, ordering: Ordering) -> RouterCounts:
    """Returns the counts of routers, which have its hooks from now on if it counts."""
    return RouterCounts([routers], range(LAYERS), EXPERTS, ordering, torch.device("cpu"))


def step_s(routers: torch.nn.ModuleList, counts: RouterCounts, step: int) -> float:
    """Returns the CPU seconds of the calls of a step, and of its commit."""
    began_s = time.process_time()
    for _ in range(MICRO_BATCHES):
        for router in routers:
            router()
    counts.commit(step, begins_window=step % WINDOW == 1)
    return time.process_time() - began_s


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)  # as a rank that shares two cores with three others
    sides = {}
    for ordering in (Ordering.INDEX, *COUNTED):
        routers = torch.nn.ModuleList(DrawnRouter(layer) for layer in range(OWN_LAYERS))
        sides[ordering] = routers, counts_of(routers, ordering)
    took_s: dict[Ordering, list[float]] = {ordering: [] for ordering in sides}
    for step in range(1, options.steps + 1):
        for ordering, (routers, counts) in sides.items():
            took_s[ordering].append(step_s(routers, counts, step))
    without_s = statistics.median(took_s[Ordering.INDEX])
    for ordering in COUNTED:
        more_s = statistics.median(took_s[ordering]) - without_s
        sys.stdout.write(f"{ordering.value}: {1e6 * more_s:.0f} us a step and rank\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
