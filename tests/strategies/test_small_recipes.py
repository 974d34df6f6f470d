"""Recipes of others, made small, lose a rank in a step and end with the same bits."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.harness.recipes import made_small

ROOT = Path(__file__).parents[2]
GPT3 = "mlm/moe__gpt3_mcore_te"
PARSED = (
    "mlm-ex/Qwen3-30B-A3B",
    f"{GPT3}_tp1_pp2_resume_torch_dist_reshard_2x1x4_te_8experts2parallel_dist_optimizer",
    f"{GPT3}_tp2_pp1_resume_torch_dist_te_8experts2parallel_dist_optimizer",
    f"{GPT3}_tp2_pp1_resume_torch_dist_te_8experts2parallel_groupedGEMM",
    f"{GPT3}_tp2_pp1_te_8experts2parallel_overlap_grad_reduce_param_gather_groupedGEMM",
    f"{GPT3}_tp2_pp1_te_8experts2parallel_top2router",
    f"{GPT3}_tp2_pp1_te_8experts_etp1_ep4",
    "mlm/moe__gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_optimizer",
    "slime/qwen3-30B-A3B",
    "zoo/Qwen3-235B-A22B",
    "zoo/Qwen3-30B-A3B",
)
LOST_IN_STEP = 7

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(400)]


def train(folder, words, ranks, *flags):
    """Trains a recipe to its end, and returns the digest of its state."""
    digest = folder / "digest.json"
    spares = ["-s", "1"] if flags else []
    command = [ROOT / "scripts" / "run_local.sh", "-n", str(ranks), *spares, "--", *words, *flags]
    command += ["--moevement-state-digest", digest, "--moevement-event-dir", folder / "events"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(digest.read_text()), done.stdout + done.stderr


@pytest.mark.parametrize("name", PARSED)
def test_a_recipe_made_small_recovers_to_the_same_bits(name, tmp_path):
    words, ranks = made_small(name)
    for part in ("whole", "struck"):
        (tmp_path / part).mkdir()
    whole, _ = train(tmp_path / "whole", words, ranks)
    strike = f"kill:{LOST_IN_STEP}:backward@{ranks - 1}"
    protected = ["--moevement-strategy", "moevement", "--inprocess-restart"]
    struck, log = train(
        tmp_path / "struck", words, ranks, *protected, "--moevement-faults", strike,
        "--moevement-window", "2", "--moevement-store-dir", str(tmp_path / "store"),
    )  # fmt: skip
    assert "generation 1" in log
    assert struck == whole
