# SPDX-License-Identifier: Apache-2.0
"""What of a process decides its bits is found where it is installed."""

import importlib

import pytest

from megatron_moevement.policy.job.guarantee import (
    Computation,
    Computations,
    DeviceKind,
    Kernels,
    decide_guarantee,
)
from megatron_moevement.training.protection import kernel_libraries


def with_library(folder, name, version):
    """Installs a library, in a version or not at all, and returns what then computes."""
    for former in folder.iterdir():
        (former / "METADATA").unlink()
        former.rmdir()
    if version is not None:
        place = folder / f"{name}-{version}.dist-info"
        place.mkdir()
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (place / "METADATA").write_text(head)
    importlib.invalidate_caches()
    return Computation(DeviceKind.CPU, Kernels.ANY, 1, kernel_libraries(), {})


@pytest.mark.parametrize("name", ["apex", "flash_attn", "flash_attn_3", "transformer_engine"])
@pytest.mark.parametrize("other", [None, "1.3"])
def test_a_spare_with_other_kernels_breaks_the_guarantee(name, other, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    first = with_library(tmp_path, name, "1.2")
    spare = with_library(tmp_path, name, other)
    assert first.parts == {name: "1.2"}
    hosts = ("host", "host")
    before = Computations((first, first), hosts)
    reasons = decide_guarantee(Computations((first, spare), hosts), before).lacking
    assert reasons == (f"rank 1 has another {name} than at first",)
