# SPDX-License-Identifier: Apache-2.0
"""Settings that are fields of Megatron-Core's `TransformerConfig`, by its names and defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_moevement.integrations.megatron.config_fields import config_fields
from megatron_moevement.settings.flags import flag

COVERED = (
    "apply_query_key_layer_scaling",
    "attention_backend",
    "cross_entropy_loss_fusion",
    "cross_entropy_fusion_impl",
    "moe_permute_fusion",
    "moe_router_fusion",
    "embedding_init_method_std",
    "rotary_interleaved",
)
"""What the layers compute differs, and nothing else: neither state nor the order of messages."""

if TYPE_CHECKING:

    @dataclasses.dataclass(frozen=True)
    class TransformerOptions:
        """The settings, as attributes."""

        def __getattr__(self, name: str) -> Any: ...
else:

    def _declare(names: Sequence[str]) -> type[Any]:
        declared = []
        for name in names:
            field = config_fields()[name]
            kind = field.kind if field.default is not None else field.kind | None
            declared.append((name, kind, flag(field.default, field.help, choices=field.choices)))
        return dataclasses.make_dataclass("TransformerOptions", declared, frozen=True)

    TransformerOptions = _declare(COVERED)
