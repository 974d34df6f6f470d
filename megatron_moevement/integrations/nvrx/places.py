"""Places: survivors of a fault keep theirs, spares take those of the lost processes."""

from __future__ import annotations

import dataclasses
from typing import Any

from nvidia_resiliency_ext.inprocess.rank_assignment import Layer, LayerFlag, Tree

from megatron_moevement.settings.restart import Granularity


class KeptPlaces(Tree):  # type: ignore[misc]  # upstream is not typed
    """Assigns places; where a whole failure domain is given up, its size is what it starts with."""

    def __init__(self, active_ranks: int, granularity: Granularity, domain: str) -> None:
        """Makes the layers of upstream's tree.

        Args:
            active_ranks: places of the job.
            granularity: what is given up with a process.
            domain: the failure domain of this process.
        """
        # With too few processes left the job stops as a whole: the limit of retries sees to it.
        layers = [
            Layer(min_ranks=1, max_ranks=active_ranks, key_or_fn="job", flag=LayerFlag.RESERVE)
        ]
        if granularity is Granularity.NODE:
            layers.append(Layer(key_or_fn=domain, flag=LayerFlag.RESERVE))
        super().__init__(layers)

    def build_tree(self, state: Any, store: Any) -> None:
        """Builds the tree from what all processes say, once, at the start."""
        super().build_tree(state, store)
        for domain in [] if len(self.layers) == 1 else self.tree.children.values():
            size = len(domain.children)
            domain.layer = dataclasses.replace(domain.layer, min_ranks=size, max_ranks=size)
