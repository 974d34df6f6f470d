# SPDX-License-Identifier: Apache-2.0
"""Whose modules the layers are made of, where no flag says it."""

import pytest

from megatron_moevement.backends.backend import BackendName, load
from megatron_moevement.settings.architecture import TransformerImpl
from megatron_moevement.settings.launch import Launch
from megatron_moevement.training.program import _with_layers
from tests.harness.tiny_job import tiny_arguments

LOCAL, ENGINE = TransformerImpl.LOCAL, TransformerImpl.TRANSFORMER_ENGINE
CPU, CUDA = BackendName.CPU, BackendName.CUDA


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Installs a package of TransformerEngine's name."""
    (tmp_path / "transformer_engine.py").touch()
    monkeypatch.syspath_prepend(tmp_path)


def chosen(backend, *flags):
    launch = Launch.from_environment()
    return _with_layers(tiny_arguments(*flags), launch, load(backend)).architecture.transformer_impl


def test_on_a_gpu_they_are_those_of_transformer_engine_where_it_is_installed(engine, caplog):
    assert chosen(CUDA) is ENGINE
    assert chosen(CPU) is LOCAL
    assert chosen(CUDA, "--transformer-impl=local") is LOCAL
    assert caplog.messages == []


def test_on_a_gpu_without_it_they_are_local_and_a_line_says_what_they_lack(caplog):
    assert chosen(CPU) is LOCAL
    assert caplog.messages == []
    assert chosen(CUDA) is LOCAL
    (line,) = caplog.messages
    assert "no flash attention" in line
    assert chosen(CUDA, "--transformer-impl=local") is LOCAL
    assert caplog.messages == [line]
