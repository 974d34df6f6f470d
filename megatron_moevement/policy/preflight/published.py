# SPDX-License-Identifier: Apache-2.0
"""Published: what the paper's memory table says of its own system, for its models and its cluster.

Sources: section 5.1 (cluster, and degrees of parallelism), table of checkpoint intervals (W), and
section 5.6, table of memory footprints. All of it is of the whole cluster, in GB, without copies.
"""

from __future__ import annotations

import dataclasses

NODES = 12
GPUS_PER_NODE = 8
NODE_BYTES = 880 * 10**9
"""Host memory of a node."""
GLOBAL_BATCH = 512
SEQUENCE = 2048


@dataclasses.dataclass(frozen=True)
class PublishedMemory:
    """A model of the paper.

    Attributes:
        preset: its name here.
        pp: pipeline stages.
        ep: expert parallelism.
        window: W.
        gemini_gb: CPU memory of Gemini; None where it is not at hand.
        slots_gb: X, sparse checkpoints.
        log_gb: Y, activations and gradients.
    """

    preset: str
    pp: int
    ep: int
    window: int
    gemini_gb: float | None = None
    slots_gb: float | None = None
    log_gb: float | None = None


PUBLISHED = (
    PublishedMemory("moe-llava", 6, 8, 3, 75.4, 81.2, 1.9),
    PublishedMemory("gpt-moe", 3, 8, 3, 189.8, 205.2, 4.2),
    PublishedMemory("qwen-moe", 6, 8, 5, 371.6, 420.8, 12.4),
    PublishedMemory("deepseek-moe", 12, 8, 6),  # of its memory the text gives a bound alone
)
