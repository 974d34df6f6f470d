# SPDX-License-Identifier: Apache-2.0
"""Preload hooks of the fork server: what a rank finds imported when it is forked."""

from __future__ import annotations

import importlib
import pkgutil

_PROGRAM = ("job", "loop", "operator_table", "program", "state_digest")


def import_megatron() -> None:
    """Installs the CPU backend and imports Megatron and the training program.

    Only imports: a hook that computes would start threads that a fork loses.
    """
    from megatron_moevement.backends import cpu  # noqa: PLC0415  (imports torch)

    cpu.install()
    package = importlib.import_module("megatron_moevement.integrations.megatron")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if not module.ispkg:
            importlib.import_module(module.name)
    for name in _PROGRAM:
        importlib.import_module(f"megatron_moevement.training.{name}")
    # torch imports it when the first optimizer is made: most of a second, in every rank.
    importlib.import_module("torch._dynamo")
