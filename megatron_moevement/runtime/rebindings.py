# SPDX-License-Identifier: Apache-2.0
"""Rebindings: all that is replaced at run time of torch, NVRx and Python itself.

Patches are for what can be patched; these places are in binary packages, or hold for a process that
asked for it alone. Each replacement stands in for a function with a signature of its own. An
upstream release that changes it would call the replacement wrongly, or no longer at all: that is
refused where the replacement is installed.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Sequence
from functools import reduce
from typing import Any

from megatron_moevement.errors import MoEvementError

CLASS = ("any, of a class",)
"""What is replaced is a class, or what makes objects like it."""


class ChangedUpstreamError(MoEvementError, RuntimeError):
    """What is to be replaced is not what the replacement was written for."""


@dataclasses.dataclass(frozen=True)
class Rebinding:
    """One thing that is replaced.

    Attributes:
        name: dotted, in the module.
        expects: names of its parameters, of one overload after the other; `CLASS` of a class.
        why: what the replacement does otherwise.
    """

    module: str
    name: str
    expects: Sequence[str]
    why: str

    @property
    def place(self) -> str:
        """Names it."""
        return f"{self.module}:{self.name}"


_NVRX = "nvidia_resiliency_ext.inprocess."
_C10D = "torch.distributed.distributed_c10d"
REBINDINGS = {
    each.place: each
    for each in (
        Rebinding(
            "threading", "Thread.start", ("self",), "no exception meets a thread that begins"
        ),
        Rebinding("torch.distributed", "Work.wait", ("self, timeout",), "restarts interrupt it"),
        Rebinding(_C10D, "ProcessGroupGloo", CLASS, "restarts interrupt its connecting"),
        Rebinding(
            "torch.distributed",
            "ProcessGroup.reduce_scatter",
            ("self, output_tensors, input_tensors, opts", "self, output, input, op, timeout"),
            "restarts interrupt it on gloo",
        ),
        Rebinding(
            "torch.distributed",
            "ProcessGroup.reduce_scatter_single",
            ("self, outputTensor, inputTensor, opts",),
            "restarts interrupt it on gloo",
        ),
        Rebinding(
            "torch.distributed",
            "ProcessGroup.reduce_scatter_single_coalesced",
            ("self, outputs, inputs, opts",),
            "restarts interrupt it on gloo",
        ),
        Rebinding(
            _C10D,
            "_coalescing_manager",
            ("group, device, async_ops",),
            "what fails in a group of NCCL's calls closes it",
        ),
        Rebinding(
            "torch.distributed",
            "all_gather_object",
            ("object_list, obj, group",),
            "a process that is built alone gathers nothing",
        ),
        Rebinding(
            f"{_NVRX}monitor_thread",
            "async_raise",
            ("tid, exc_type, event",),
            "no exception meets a thread that begins",
        ),
        Rebinding(
            f"{_NVRX}monitor_thread",
            "MonitorThread.maybe_join",
            ("self, timeout",),
            "a failed rank restarts although its code swallowed the interrupt",
        ),
        Rebinding(
            f"{_NVRX}monitor_process",
            "terminate_process",
            ("process, termination_grace_time",),
            "a process that is given up never resumes",
        ),
        Rebinding(f"{_NVRX}monitor_process", "PrefixStore", CLASS, "stores are sealed"),
        Rebinding(
            f"{_NVRX}sibling_monitor",
            "SiblingMonitor.check_heartbeats",
            ("self",),
            "no clock decides which process is silent",
        ),
        Rebinding(f"{_NVRX}wrap", "PrefixStore", CLASS, "stores are sealed"),
        Rebinding(
            f"{_NVRX}wrap",
            "reserve_fn",
            ("state, store, progress_watchdog, progress_watchdog_interval",),
            "a process that waits for a rank keeps copies",
        ),
    )
}
"""By place."""
GATHERINGS = {
    "all_gather": "tensor_list, tensor, group, async_op",
    "gather": "tensor, gather_list, dst, group, async_op, group_dst",
    "scatter": "tensor, scatter_list, src, group, async_op, group_src",
    "broadcast": "tensor, src, group, async_op, group_src",
    "barrier": "group, async_op, device_ids, timeout",
}
"""Parameters of the collectives whose results the host reads, those of objects among them."""
REBINDINGS |= {
    each.place: each
    for name, parameters in GATHERINGS.items()
    for module in ("torch.distributed", _C10D)
    for each in [Rebinding(module, name, (parameters,), "restarts interrupt it on NCCL")]
}
_UNSUPPORTED = "this release of it is not supported"
_installed: dict[str, Any] = {}


def rebind(place: str, replacement: Any) -> None:
    """Replaces something in all of this process from now on.

    Raises:
        ChangedUpstreamError: it is another thing than the table expects.
    """
    rebinding = REBINDINGS[place]
    *path, name = rebinding.name.split(".")
    owner = reduce(getattr, path, importlib.import_module(rebinding.module))
    present = getattr(owner, name, None)
    if place not in _installed or present is not _installed[place]:
        _check(rebinding, present)
    setattr(owner, name, replacement)
    _installed[place] = getattr(owner, name)


def _check(rebinding: Rebinding, present: Any) -> None:
    if present is None:
        raise ChangedUpstreamError(f"there is no {rebinding.place}: {_UNSUPPORTED}")
    found = CLASS if inspect.isclass(present) else parameters_of(present)
    if tuple(found) != tuple(rebinding.expects):
        raise ChangedUpstreamError(
            f"{rebinding.place} takes ({') or ('.join(found)}), not "
            f"({') or ('.join(rebinding.expects)}): {_UNSUPPORTED}"
        )


def parameters_of(function: Any) -> tuple[str, ...]:
    """Returns the names of a function's parameters, of one overload after the other."""
    try:
        return (", ".join(inspect.signature(function).parameters),)
    except (TypeError, ValueError):  # compiled: its documentation begins with its signatures
        signature = re.compile(rf"^(?:\d+\. )?{function.__name__}\((self.*)\) ->", re.MULTILINE)
        lines = signature.findall(function.__doc__ or "")
        names = (re.findall(r"(?:^|, )(\w+)(?=: )", line) for line in lines)
        return tuple(", ".join(each) for each in names)
