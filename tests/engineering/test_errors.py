# SPDX-License-Identifier: Apache-2.0
"""Whoever embeds this package catches all of its exceptions by one class."""

import json
import subprocess
import sys

LIST = """
import importlib, inspect, json, pkgutil
import megatron_moevement
from megatron_moevement.errors import MoEvementError

found = {}
for module in pkgutil.walk_packages(megatron_moevement.__path__, "megatron_moevement."):
    if ".testing" in module.name or module.name.endswith("__main__"):
        continue
    for one in vars(importlib.import_module(module.name)).values():
        is_own = inspect.isclass(one) and one.__module__ == module.name
        if is_own and issubclass(one, BaseException):
            found[one.__name__] = issubclass(one, MoEvementError)
print(json.dumps(found))
"""
OTHERS = {"ForeignValueError", "InjectedExit", "StartAgainAbort"}
"""NVRx and the interpreter handle these by classes of their own."""


def test_all_exceptions_have_one_base():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LIST], check=True, capture_output=True, text=True
    )
    found = json.loads(done.stdout)
    assert len(found) > 40
    assert {name for name, is_ours in found.items() if not is_ours} == OTHERS
