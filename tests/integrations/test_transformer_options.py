# SPDX-License-Identifier: Apache-2.0
"""Settings that are fields of Megatron-Core's configuration reach it."""

import pytest
from megatron.core.transformer.enums import AttnBackend

from megatron_moevement.backends.backend import BackendName
from megatron_moevement.integrations.megatron.transformer_config import transformer_config
from megatron_moevement.integrations.megatron.transformer_options import (
    COVERED,
    TransformerOptions,
)
from megatron_moevement.settings.architecture import Architecture, MixtureOfExperts
from megatron_moevement.settings.parallelism import Parallelism
from megatron_moevement.settings.precision import Precision

OTHER = {
    "apply_query_key_layer_scaling": True,
    "attention_backend": "unfused",
    "cross_entropy_loss_fusion": True,
    "cross_entropy_fusion_impl": "native",
    "embedding_init_method_std": 0.5,
    "rotary_interleaved": True,
}
"""Values that are no defaults."""
NEED_TRANSFORMER_ENGINE = {"moe_permute_fusion", "moe_router_fusion"}


def config(backend, **options):
    model = Architecture(num_layers=2, hidden_size=8, num_attention_heads=2)
    settings = (model, MixtureOfExperts(), TransformerOptions(**options), Parallelism())
    precision = Precision(bf16=True)
    return transformer_config(*settings, precision, backend=backend, deterministic=False)


def test_each_setting_reaches_its_field():
    assert OTHER.keys() | NEED_TRANSFORMER_ENGINE == set(COVERED)
    built = config(BackendName.CUDA, **OTHER)
    found = {name: getattr(built, name) for name in OTHER}
    assert found == OTHER | {"attention_backend": AttnBackend.unfused}


@pytest.mark.parametrize("backend", BackendName)
def test_fusions_need_a_gpu_and_transformer_engine(backend):
    built = config(backend, **dict.fromkeys(NEED_TRANSFORMER_ENGINE, True))
    assert not any(getattr(built, name) for name in NEED_TRANSFORMER_ENGINE)


def test_the_host_fuses_no_cross_entropy():
    assert not config(BackendName.CPU, cross_entropy_loss_fusion=True).cross_entropy_loss_fusion
