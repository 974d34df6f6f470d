"""Preload hooks of the fork server: what a rank finds imported when it is forked."""

from __future__ import annotations

import importlib
import pkgutil


def import_megatron() -> None:
    """Installs the CPU backend and imports Megatron through every module of the integration.

    Only imports: a hook that computes would start threads that a fork loses.
    """
    from megatron_moevement.backends import cpu  # noqa: PLC0415  (imports torch)

    cpu.install()
    package = importlib.import_module("megatron_moevement.integrations.megatron")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if not module.ispkg:
            importlib.import_module(module.name)
