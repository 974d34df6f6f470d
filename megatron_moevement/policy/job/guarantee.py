# SPDX-License-Identifier: Apache-2.0
"""The guarantee: which bits a job ends with after a recovery, decided from what computes them.

EXACT means those of the same job without the failure. It needs kernels and collectives that give
the same bits whenever they are given the same input, and a process that takes a rank over must
compute as the one before it did. What no process can see of itself or of the others is listed in
docs/use/guarantee.md. Source: design of `--deterministic-mode` in megatron/training/arguments.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from typing import NamedTuple

from megatron_moevement.policy.document import Document


class Level(Enum):
    """What a recovery promises."""

    EXACT = "EXACT"
    """The bits of a job that nothing interrupts."""

    CONSISTENT = "CONSISTENT"
    """No step, sample or update is lost, but bits may differ: a valid trajectory, another one."""


class Kernels(Enum):
    """Which kernels torch may choose."""

    ANY = "any"
    DETERMINISTIC = "deterministic"


class DeviceKind(Enum):
    """Where a model is computed, and so what carries its collectives."""

    CPU = "cpu"
    """Over gloo, whose order of reduction goes by ranks alone."""

    CUDA = "cuda"
    """Over NCCL, whose order of reduction goes by algorithm, protocol and topology."""


DECIDING_VARIABLES = (
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "MKL_CBWR",
    "NCCL_*",
    "NVIDIA_TF32_OVERRIDE",
    "NVTE_*",
    "PYTORCH_TUNABLEOP_*",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
)
"""Patterns of variables of the environment that decide bits, or wires and so the order of sums."""
_DECIDING_NOTHING = ("NCCL_COMM_ID", "NCCL_DEBUG*", "NCCL_HOSTID", "NVTE_DEBUG*")

_COLLECTIVES = ("allgather", "allreduce", "broadcast", "reduce", "reducescatter")
_ALGORITHMS = {**dict.fromkeys(_COLLECTIVES, ("ring",)), "allreduce": ("ring", "tree")}
"""By collective. Upstream calls all but one of them, and NCCL has a tree for one only."""
_PROTOCOLS = dict.fromkeys(_COLLECTIVES, ("simple", "ll"))
"""By collective. NCCL looks whether wires can carry LL128 only where it may choose another one."""
_WORKSPACES = (":4096:8", ":16:8")


def deciding_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of an environment that decide bits."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if _is_one_of(name, DECIDING_VARIABLES) and not _is_one_of(name, _DECIDING_NOTHING)
    }


def _is_one_of(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclasses.dataclass(frozen=True)
class Computation(Document):
    """What decides, besides the flags of the job, the bits that a process computes.

    Attributes:
        threads: of one operation on the CPU.
        parts: name to name: the device's model, its place on the machine, and the versions of what
            runs on it.
        variables: those of `DECIDING_VARIABLES` that are set.
    """

    device: DeviceKind
    kernels: Kernels
    threads: int
    parts: Mapping[str, str]
    variables: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Computations:
    """What the ranks of a job compute with, in their order.

    Attributes:
        by_rank: one and the same object where ranks compute alike.
        hosts: names of their machines.
    """

    by_rank: Sequence[Computation] = ()
    hosts: Sequence[str] = ()

    @property
    def distinct(self) -> Iterable[Computation]:
        """What ranks compute with, once where they have one and the same object."""
        return {id(own): own for own in self.by_rank}.values()


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """What a job may rely on.

    Attributes:
        lacking: the conditions of EXACT that do not hold, each in a few words.
    """

    lacking: tuple[str, ...] = ()

    @property
    def level(self) -> Level:
        """What follows from it."""
        return Level.CONSISTENT if self.lacking else Level.EXACT

    def __str__(self) -> str:
        if self.level is Level.EXACT:
            return "EXACT: a recovery changes no bit"
        return "CONSISTENT: a recovery loses nothing, bits may differ: " + "; ".join(self.lacking)


def decide_guarantee(
    job: Computations,
    origin: Computations | None = None,
    before: Guarantee = Guarantee(),
) -> Guarantee:
    """Returns what a job may rely on in a generation.

    Args:
        job: what its ranks compute with.
        origin: the same of the job's first generation; None: this is it.
        before: of the generation before: what is lost once stays lost.
    """
    unlike = dict.fromkeys(map(_Chances.of, job.distinct))
    found = [reason for own in unlike for reason in _chance(own)]
    if origin is not None:
        found += _differences(job, origin)
    return Guarantee(tuple(dict.fromkeys([*before.lacking, *found])))


def unverified(guarantee: Guarantee, step: int) -> Guarantee:
    """Returns what is left of a guarantee when a replay differed from the first time."""
    reason = f"the replay up to step {step} differed from the first time"
    return Guarantee(tuple(dict.fromkeys([*guarantee.lacking, reason])))


class _Chances(NamedTuple):
    """What of a computation may leave its bits to chance: ranks have it in common."""

    device: DeviceKind
    kernels: Kernels
    threads: int
    set_variables: tuple[tuple[str, str], ...]
    has_engine: bool
    """Kernels come with TransformerEngine, too."""

    @classmethod
    def of(cls, own: Computation) -> _Chances:
        """Returns those of one process."""
        variables = tuple(own.variables.items())
        engine = "transformer_engine" in own.parts
        return cls(own.device, own.kernels, own.threads, variables, engine)


def _chance(own: _Chances) -> list[str]:
    """Returns what leaves the bits of one process to chance."""
    if own.device is DeviceKind.CPU:
        if own.kernels is Kernels.ANY and own.threads > 1:
            return ["several threads per operation without --deterministic-mode"]
        return []
    variables = dict(own.set_variables)
    reasons = [] if own.kernels is Kernels.DETERMINISTIC else ["--deterministic-mode is off"]
    if not _is_fixed(variables.get("NCCL_ALGO", ""), _ALGORITHMS):
        reasons.append("NCCL_ALGO is none of Ring, Ring;AllReduce:Tree")
    if not _is_fixed(variables.get("NCCL_PROTO", ""), _PROTOCOLS):
        reasons.append("NCCL_PROTO is none of Simple, LL")
    if variables.get("CUBLAS_WORKSPACE_CONFIG") not in _WORKSPACES:
        reasons.append(f"CUBLAS_WORKSPACE_CONFIG is none of {', '.join(_WORKSPACES)}")
    if variables.get("PYTORCH_TUNABLEOP_ENABLED") == "1":
        reasons.append("PYTORCH_TUNABLEOP_ENABLED is 1, and times choose kernels")
    engine = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    if own.has_engine and variables.get(engine) != "0":
        reasons.append(f"{engine} is not 0")
    return reasons


def _is_fixed(text: str, wanted: Mapping[str, Sequence[str]]) -> bool:
    """Whether a variable of NCCL leaves one of some choices to each collective.

    Source: `parseList` in src/graph/tuning.cc of NCCL, from version 2.24 on.
    """
    chosen = dict.fromkeys(_COLLECTIVES, "")
    for entry in text.lower().split(";"):
        collective, _, names = entry.rpartition(":")
        chosen.update(dict.fromkeys([collective] if collective else _COLLECTIVES, names))
    return all(names in wanted.get(collective, ()) for collective, names in chosen.items())


def _differences(job: Computations, origin: Computations) -> list[str]:
    """Returns which ranks compute otherwise than at first."""
    ranks, before = len(job.by_rank), len(origin.by_rank)
    if ranks != before:
        return [f"{ranks} ranks instead of {before}"]
    reasons = [
        f"rank {rank} has another {name} than at first"
        for rank, (now, first) in enumerate(zip(job.by_rank, origin.by_rank, strict=True))
        for name in _different_names(now, first)
    ]
    on_cuda = any(own.device is DeviceKind.CUDA for own in job.distinct)
    if on_cuda and _shape(job.hosts) != _shape(origin.hosts):
        reasons.append("ranks are spread over machines otherwise than at first")
    return reasons


def _different_names(now: Computation, first: Computation) -> list[str]:
    names = [
        name
        for name in ("device", "kernels", "threads")
        if getattr(now, name) != getattr(first, name)
    ]
    for mine, others in ((now.parts, first.parts), (now.variables, first.variables)):
        if mine != others:
            names += sorted(name for name in {*mine, *others} if mine.get(name) != others.get(name))
    return names


def _shape(hosts: Sequence[str]) -> list[int]:
    """Returns for each rank the first rank on the same machine."""
    first: dict[str, int] = {}
    return [first.setdefault(host, rank) for rank, host in enumerate(hosts)]
