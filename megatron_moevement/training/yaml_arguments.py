# SPDX-License-Identifier: Apache-2.0
"""`--yaml-cfg`: settings in Megatron-LM's YAML, which have the names of its attributes.

Sections are names for the reader. A value of null, and what Megatron-Core's configuration has
anyway, say nothing.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.config_fields import config_fields
from megatron_moevement.training.refusals import answer

_FLAG = "--yaml-cfg"
_OTHER_NAMES = {
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "apply_rope_fusion": "rope_fusion",
    "overlap_p2p_comm": "overlap_p2p_communication",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
"""By attribute that has no flag of its name the one of the flag."""

_ACTIVATIONS = {"gelu": (), "swiglu": ("--swiglu",), "squaredrelu": ("--squared-relu",)}
_OF_OTHER_MODELS = frozenset({"bert_binary_head"})
"""Attributes that say nothing of a GPT."""


def with_yaml(argv: Sequence[str], settings: Collection[str]) -> Sequence[str]:
    """Returns a command line with the flags of its YAML file before its own, which win.

    Args:
        settings: the flags that are settings here.

    Raises:
        UserError: the file can't be read, or says what no flag can say.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(_FLAG, nargs="*", default=())
    given, rest = parser.parse_known_args(argv)
    return [*(word for path in given.yaml_cfg for word in _words(Path(path), settings)), *rest]


def _words(path: Path, settings: Collection[str]) -> Iterator[str]:
    for name, value in settings_of(path).items():
        if value is None or value in ("", []) or name in _OF_OTHER_MODELS:
            continue
        if name == "activation_func":
            if value not in _ACTIVATIONS:
                raise UserError(f"{_FLAG} {path}: {name} is none of {', '.join(_ACTIVATIONS)}")
            yield from _ACTIVATIONS[value]
        else:
            yield from _flags(name, value, settings)


def settings_of(path: Path) -> Mapping[str, Any]:
    """Returns the settings of a file, those in sections as well.

    Raises:
        UserError: it can't be read.
    """
    try:
        text = re.sub(r"\$\{(\w+)\}", _variable, path.read_text(encoding="utf-8"))
        document = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{_FLAG} {path}: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise UserError(f"{_FLAG} {path}: give a mapping of settings")
    found: dict[str, Any] = {}
    for name, value in document.items():
        found |= value if isinstance(value, dict) else {str(name): value}
    return found


def _variable(match: re.Match[str]) -> str:
    value = os.environ.get(match[1])
    if value is None:
        raise ValueError(f"there is no variable {match[1]} in the environment")
    return value


def _flags(name: str, value: Any, settings: Collection[str]) -> Iterator[str]:
    words = _OTHER_NAMES.get(name, name).replace("_", "-")
    positive, negative = f"--{words}", f"--no-{words}"
    field = config_fields().get(name)
    is_setting = bool({positive, negative} & set(settings))
    if field is not None and not is_setting:
        if value != field.default:
            yield field.flags[0]
            yield from () if isinstance(value, bool) else _texts(name, value)
    elif value is False:
        yield from (negative,) if negative in settings else ()
    elif value is True:
        is_default = negative in settings or (answer(positive) is None and answer(negative))
        yield from () if is_default else (positive,)
    else:
        yield positive
        yield from _texts(name, value)


def _texts(name: str, value: Any) -> Sequence[str]:
    """Returns the words of a value; a list that is one word stays one."""
    if isinstance(value, list) and name != "moe_layer_freq":
        return [str(one) for one in value]
    return str(value).split() if name.endswith("data_path") else [str(value)]
