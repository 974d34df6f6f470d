# SPDX-License-Identifier: Apache-2.0
"""The parts of the check, in the order in which they run."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path

from tests.harness.gpu_check.results import Found, Scale

Check = Callable[[Scale, Path], Found]
"""Computes at a scale; its files go into an empty folder in memory."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One part; it runs in a process of its own.

    Attributes:
        module: of this package, with the function.
        shows: in a line.
        gpus: without so many it shows nothing.
    """

    name: str
    module: str
    function: str
    shows: str
    gpus: int = 0

    @property
    def check(self) -> Check:
        """The function."""
        module = importlib.import_module(f"{__package__}.{self.module}")
        found: Check = getattr(module, self.function)
        return found


PARTS = {
    part.name: part
    for part in (
        Part("machine", "machine", "describe", "versions and machine"),
        Part("tests", "marked_tests", "run_marked", "tests marked gpu", gpus=1),
        Part("copies", "copies", "copy", "copies to the host: bits, bandwidth, device memory"),
        Part("log", "copies", "log", "the upstream log: bits, bandwidth"),
        Part("experts", "experts", "compare", "grouped experts, some or all without tokens"),
        Part("relaunch", "jobs", "relaunch", "killed and launched again: same bits"),
        Part("tier", "tiers", "convert", "a tier becomes a checkpoint on a CPU"),
        Part("restart-pp2", "jobs", "restart_stages", "a stage is lost, ranks share a GPU"),
        Part("restart-ep2", "jobs", "restart_experts", "an expert rank is lost, the same"),
        Part("restart-nccl", "jobs", "restart_nccl", "a stage is lost, over NCCL", gpus=3),
        Part("frozen-bits", "frozen", "compare_bits", "a step with frozen operators: same bits"),
        Part("frozen-time", "frozen", "time_steps", "a step with frozen operators: its time"),
        Part("throughput", "throughput", "measure", "each iteration captured, against off"),
        Part("pieces", "pieces", "measure", "each iteration captured, by the size of copies"),
        Part("device-time", "device_time", "measure", "what the device does in a step", gpus=1),
        Part(
            "synchronizations",
            "synchronizations",
            "count",
            "calls that wait for the device, in a step",
            gpus=1,
        ),
    )
}
"""By name."""
