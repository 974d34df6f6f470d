# SPDX-License-Identifier: Apache-2.0
"""A tier of a job on a GPU becomes a checkpoint on a CPU, and a job on the GPU loads it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from megatron_moevement.backends.backend import BackendName, choose
from megatron_moevement.runtime.observation.events import EventName
from tests.harness.gpu_check.jobs import FAULT, PROTECTED, STEPS, Jobs, fields_of, flags_of
from tests.harness.gpu_check.results import Found, Scale

_WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def convert(scale: Scale, folder: Path) -> Found:
    """Kills a job, takes its memory away, converts its newest tier on the CPU, and loads that."""
    jobs, save = Jobs(folder, flags_of(scale, folder)), folder / "saved"
    tiers = ("--moevement-run-id=tier", f"--moevement-tier-dir={folder / 'tiers'}")
    flags = (*PROTECTED, "--moevement-replicas=0", *tiers)
    plain = jobs.run("plain")
    with tempfile.TemporaryDirectory(prefix="store-", dir=folder) as store:
        where = f"--moevement-store-dir={store}"
        killed = jobs.run("killed", *flags, where, "--moevement-faults", f"{FAULT}:barrier")
    with tempfile.TemporaryDirectory(prefix="store-", dir=folder) as store:
        where = f"--moevement-store-dir={store}"
        conversion = ("--moevement-recover-only", f"--save={save}", "--moevement-backend=cpu")
        converted = jobs.run("converted", *flags, where, *conversion, env=_WITHOUT_GPU)
    loaded = jobs.run("loaded", f"--load={save}")
    problems = [] if killed.code else ["no fault struck"]
    problems += [*plain.failures, *converted.failures, *loaded.failures]
    plans = fields_of(converted, EventName.PLAN)
    if [plan["verdict"] for plan in plans] != ["GLOBAL"]:
        problems.append(f"the tier was not replayed: {plans}")
    if loaded.digest is None or loaded.digest["iteration"] != STEPS:
        problems.append("the job that loaded the checkpoint has not come to its end")
    on_gpu = choose(None) is BackendName.CUDA
    if not on_gpu and loaded.digest != plain.digest:
        problems.append("the digests differ")
    recoveries = fields_of(converted, EventName.RECOVERED)
    guarantees = sorted({str(each["guarantee"]) for each in recoveries})
    if guarantees != ["CONSISTENT" if on_gpu else "EXACT"]:
        problems.append(f"the guarantee of the conversion is {guarantees}")
    figures = {
        "tier of step": [plan["target"] for plan in plans],
        "guarantee": ", ".join(guarantees),
    }
    return Found(figures, problems)
