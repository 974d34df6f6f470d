# SPDX-License-Identifier: Apache-2.0
"""`scripts/train_moe.sbatch` on a real Slurm: whatever a job loses, it ends with the same bits.

As root, after apt-get install -y slurmctld slurmd slurm-client munge:

    ./scripts/test.sh -m 'slow or not slow' tests/launch/test_slurm.py
"""

import functools
import json
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.slurm_job import GRACE_S, Case

ROOT = Path(__file__).resolve().parents[2]
LOCAL = ROOT / "scripts" / "slurm_local.sh"
HAS_SLURM = all(map(shutil.which, ("slurmctld", "slurmd", "munged", "srun"))) and not os.getuid()

TRIALS = [
    pytest.param(case, number, marks=pytest.mark.slow if number or case is not Case.PROCESS else ())
    for number in range(3)
    for case in Case
    if case is not Case.NOTHING
]

pytestmark = pytest.mark.skipif(not HAS_SLURM, reason="Slurm is not installed, or not as root")


def run(case, seed, folder, steps):
    """Runs a case; returns the digest of the state that its job ended with, and what it printed."""
    command = [LOCAL, sys.executable, "-m", "tests.harness.slurm_job", case.value, seed, folder]
    command.append(str(steps))
    grace_s = GRACE_S if case is Case.GRACE else 0
    environment = os.environ | {"NODES": "4", "GRACE_S": str(grace_s)}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    log = folder / "log"
    tail = log.read_text()[-4000:] if log.exists() else ""
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{tail}"
    return json.loads((folder / "digest.json").read_text()), done.stdout


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Returns the digest of a job of some steps to which nothing happens."""

    @functools.cache
    def digest(steps):
        return run(Case.NOTHING, "0", tmp_path_factory.mktemp("slurm") / "undisturbed", steps)[0]

    return digest


@pytest.mark.timeout(60)
def test_a_command_has_nodes_of_its_own():
    count = 'srun --nodes 3 --ntasks 6 bash -c "echo \\$SLURMD_NODENAME" | sort -u'
    done = subprocess.run([LOCAL, "bash", "-c", count], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["n1", "n2", "n3"], done.stderr


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("case", "number"), TRIALS)
def test_what_a_job_loses_changes_no_bit(case, number, undisturbed, tmp_path, capsys):
    seed = secrets.token_hex(4)
    digest, printed = run(case, seed, tmp_path / "job", case.steps)
    with capsys.disabled():
        sys.stdout.write(f"seed {seed}, {printed}")
    assert digest == undisturbed(case.steps)
