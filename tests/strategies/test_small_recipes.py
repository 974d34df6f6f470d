# SPDX-License-Identifier: Apache-2.0
"""Recipes of others, made small, lose a rank in a step and end with the same bits."""

import json
import subprocess
from pathlib import Path

import pytest

from megatron_moevement.cli import main
from megatron_moevement.runtime.observation.events import EventName, read_events
from tests.harness.recipes import made_small

ROOT = Path(__file__).parents[2]
GPT3 = "mlm/moe__gpt3_mcore_te"
VERDICTS = {
    "mlm-ex/Qwen3-30B-A3B": "LOCALIZED",
    f"{GPT3}_tp1_pp2_resume_torch_dist_reshard_2x1x4_te_8experts2parallel_dist_optimizer": "GLOBAL",
    f"{GPT3}_tp2_pp1_resume_torch_dist_te_8experts2parallel_dist_optimizer": "GLOBAL",
    f"{GPT3}_tp2_pp1_resume_torch_dist_te_8experts2parallel_groupedGEMM": "GLOBAL",
    f"{GPT3}_tp2_pp1_te_8experts2parallel_overlap_grad_reduce_param_gather_groupedGEMM": "GLOBAL",
    f"{GPT3}_tp2_pp1_te_8experts2parallel_top2router": "GLOBAL",
    f"{GPT3}_tp2_pp1_te_8experts_etp1_ep4": "GLOBAL",
    "mlm/moe__gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_optimizer": "GLOBAL",
    "slime/qwen3-30B-A3B": "LOCALIZED",
    "zoo/Mixtral-8x7B": "LOCALIZED",
    "zoo/Qwen3-235B-A22B": "LOCALIZED",
    "zoo/Qwen3-30B-A3B": "LOCALIZED",
}
"""Recipes, with what their recovery is: of one stage, where stages share no embedding."""
LOST_IN_STEP = 7
WINDOW = 2

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(400)]


def train(folder, words, ranks, *flags, spares=0):
    """Trains a recipe to its end, and returns the digest of its state."""
    folder.mkdir()
    digest = folder / "digest.json"
    command = [ROOT / "scripts" / "run_local.sh", "-n", str(ranks), "-s", str(spares), "--"]
    command += [*words, *flags, "--moevement-state-digest", digest]
    command += ["--moevement-event-dir", folder / "events"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(digest.read_text())


@pytest.mark.parametrize("name", VERDICTS)
def test_a_recipe_made_small_recovers_to_the_same_bits(name, tmp_path):
    words, ranks = made_small(name)
    whole = train(tmp_path / "whole", words, ranks)
    strike = f"kill:{LOST_IN_STEP}:backward@{ranks - 1}"
    protected = ["--moevement-strategy", "moevement", "--inprocess-restart"]
    protected += ["--moevement-window", str(WINDOW), "--moevement-no-replica-copy"]
    protected += ["--moevement-faults", strike, "--moevement-store-dir", str(tmp_path / "store")]
    struck = train(tmp_path / "struck", words, ranks, *protected, spares=1)
    events = tmp_path / "struck" / "events"
    assert main(["recoveries", str(events), "--require", VERDICTS[name]]) == 0
    replayed = [event for event in read_events(events) if event.event is EventName.REPLAY]
    assert len({event.iteration for event in replayed}) >= WINDOW - 1
    assert struck == whole
