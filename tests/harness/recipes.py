# SPDX-License-Identifier: Apache-2.0
"""Launch scripts of others: the flags of 46 real ones, whole and made small.

`recipes.json` has the flags alone. What a script takes from its environment is chosen here.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from math import lcm
from pathlib import Path

RECIPES: dict[str, str] = json.loads(Path(__file__).with_suffix(".json").read_text())
CHOSEN = {
    "TP": "1", "PP": "2", "EP": "4", "CP": "1", "LAYERS_PER_VP": "1", "MBS": "1", "GBS": "256",
    "SEQ_LEN": "4096", "PP_FIRST": "7", "PP_LAST": "6", "MOE_GROUPED_GEMM": "--moe-grouped-gemm",
    "MOE_TOKEN_DISPATCHER": "alltoall", "DATA_BLEND": "data", "NAME": "run", "WANDB": "moe",
}  # fmt: skip
"""What the scripts leave to their environment; any other variable is a folder."""
MISSING = {
    "--micro-batch-size": "1",
    "--global-batch-size": "256",
    "--seq-length": "4096",
    "--train-iters": "100",
    "--lr": "1e-4",
    "--data-path": "data",
    "--save": "checkpoints",
    "--load": "checkpoints",
    "--tokenizer-type": "HuggingFaceTokenizer",
    "--tokenizer-model": "model/tokenizer.json",
}
"""What configurations of models alone leave out."""


def command_line(name: str) -> list[str]:
    """Returns the words of a recipe as its shell would hand them on."""

    def value(match: re.Match[str]) -> str:
        default = match[0].partition(":-")[2].rstrip("}")
        return CHOSEN.get(match[1], default or match[1].lower())

    text = RECIPES[name].replace("$MOE_LAYER_FREQ", "1")  # a list that the shell computes
    text = re.sub(r"\$\{?([A-Z_]+)(:-[^}]*)?\}?", value, text)
    return [word for word in shlex.split(text.replace("\\", "")) if word]


def words_of(name: str) -> tuple[list[str], int]:
    """Returns a recipe with the flags that it leaves to others, and its number of ranks."""
    words = command_line(name)
    for flag, value in MISSING.items():
        samples = flag == "--train-iters" and "--train-samples" in words
        pairs = flag.startswith("--tokenizer") and "--merge-file" in words
        if flag not in words and not samples and not pairs:
            words += [flag, value]
    return words, ranks(words)


def ranks(words: Sequence[str]) -> int:
    """Returns the fewest ranks that a layout can be of."""

    def size(flag: str, default: int = 1) -> int:
        return int(words[words.index(flag) + 1]) if flag in words else default

    tensor = size("--tensor-model-parallel-size")
    experts = size("--expert-model-parallel-size")
    expert_tensor = size("--expert-tensor-parallel-size", tensor)
    return size("--pipeline-model-parallel-size") * lcm(tensor, experts * expert_tensor)


SMALL = {
    "--num-layers": "4",
    "--hidden-size": "32",
    "--ffn-hidden-size": "64",
    "--moe-ffn-hidden-size": "32",
    "--moe-shared-expert-intermediate-size": "32",
    "--num-attention-heads": "4",
    "--num-query-groups": "2",
    "--kv-channels": "8",
    "--num-experts": "4",
    "--moe-router-topk": "2",
    "--moe-layer-freq": "1",
    "--seq-length": "16",
    "--max-position-embeddings": "64",
    "--vocab-size": "96",
    "--make-vocab-size-divisible-by": "64",
    "--micro-batch-size": "1",
    "--global-batch-size": "8",
    "--train-samples": "64",
    "--lr-decay-samples": "64",
    "--lr-warmup-samples": "8",
    "--train-iters": "8",
    "--lr-decay-iters": "8",
    "--lr": "1e-2",
    "--eval-iters": "0",
    "--transformer-impl": "local",
    "--tensor-model-parallel-size": "2",
    "--expert-model-parallel-size": "2",
    "--pipeline-model-parallel-size": "2",
    "--num-workers": "0",
}
"""Values in a recipe made small; a number that is smaller already stays."""
DROPPED = {
    "--data-path", "--split", "--vocab-file", "--merge-file", "--tokenizer-type",
    "--tokenizer-model", "--save", "--load", "--save-interval", "--save-retain-interval",
    "--finetune", "--no-load-optim", "--no-load-rng", "--data-cache-path", "--tensorboard-dir",
    "--wandb-project", "--wandb-exp-name", "--wandb-entity", "--wandb-save-dir",
    "--exit-interval", "--exit-duration-in-mins",
}  # fmt: skip
"""What is of the machine and of the data."""
DATA = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "96")


def made_small(name: str) -> tuple[list[str], int]:
    """Returns a recipe of the same features that a small machine trains, and its ranks."""
    words, _ = words_of(name)
    flags: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            flags.append([word])
        else:
            flags[-1].append(word)
    small: list[str] = []
    for flag, *values in flags:
        if flag not in DROPPED and flag != "--vocab-size":
            small += [flag, *([_smaller(flag, values[0])] if flag in SMALL else values)]
    small += DATA
    if ranks(small) == 1:  # a model alone
        small += ["--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "2"]
    return small, ranks(small)


def _smaller(flag: str, given: str) -> str:
    number = SMALL[flag]
    return given if given.isdigit() and int(given) < int(number) else number
