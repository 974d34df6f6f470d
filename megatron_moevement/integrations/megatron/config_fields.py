# SPDX-License-Identifier: Apache-2.0
"""The fields of Megatron-Core's configurations, read as text: flags are made of them.

Command lines are parsed before Megatron-Core may be imported, as `fork/marker.py` says.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.fork.marker import INSTALL_COMMAND, megatron_root

_CONFIG = "megatron/core/transformer/transformer_config.py"
_PARALLEL_CONFIG = "megatron/core/model_parallel_config.py"
_ENUMS = "megatron/core/transformer/enums.py"
_KINDS: Mapping[str, type[Any]] = {"bool": bool, "int": int, "float": float, "str": str}


@dataclasses.dataclass(frozen=True)
class ConfigField:
    """One field that a flag can set.

    Attributes:
        flags: what upstream's programs call it on their command lines.
        kind: of its values, one of bool, int, float, str; an enumeration's members by name.
        default: None too where upstream finds it out later.
        choices: the only values; None: any of the kind.
        help: the first sentence of upstream's description.
    """

    name: str
    flags: tuple[str, ...]
    kind: type[Any]
    default: Any
    choices: tuple[str, ...] | None
    help: str


@functools.cache
def config_fields() -> Mapping[str, ConfigField]:
    """Returns the fields of `TransformerConfig` that hold a plain value, by name.

    Raises:
        UserError: Megatron-Core is not installed.
    """
    enums = {one.name: _members(one) for one in _classes(_ENUMS).values()}
    parallel = _classes(_PARALLEL_CONFIG)["ModelParallelConfig"]
    transformer = _classes(_CONFIG)["TransformerConfig"]
    found = [*_fields(parallel, enums), *_fields(transformer, enums)]
    return {field.name: field for field in found}


@functools.cache
def latent_attention_fields() -> Mapping[str, ConfigField]:
    """Returns the fields that `MLATransformerConfig` has besides, by name."""
    found = _fields(_classes(_CONFIG)["MLATransformerConfig"], {})
    return {field.name: field for field in found if field.name not in config_fields()}


@functools.cache
def _classes(path: str) -> Mapping[str, ast.ClassDef]:
    root = megatron_root()
    file = None if root is None else Path(root) / path
    if file is None or not file.is_file():
        raise UserError(f"Megatron-Core is not installed: run `{INSTALL_COMMAND}`")
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


def _members(enum: ast.ClassDef) -> tuple[str, ...]:
    targets = [node.targets[0] for node in enum.body if isinstance(node, ast.Assign)]
    return tuple(target.id for target in targets if isinstance(target, ast.Name))


def _fields(config: ast.ClassDef, enums: Mapping[str, tuple[str, ...]]) -> Iterator[ConfigField]:
    following = [*config.body[1:], ast.Pass()]
    for node, after in zip(config.body, following, strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        kind, choices = _kind(node.annotation, enums)
        if kind is not None and not node.target.id.startswith("_"):
            name, (default, flags) = node.target.id, _declared(node.value)
            text = _help(after) or f"as `{name}` of Megatron-Core"
            yield ConfigField(name, flags or _flags(name, default), kind, default, choices, text)


def _kind(
    annotation: ast.expr, enums: Mapping[str, tuple[str, ...]]
) -> tuple[type[Any] | None, tuple[str, ...] | None]:
    """Returns what values are of, and which there are; None for what no word can stand for."""
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name):
        inner = annotation.slice
        if annotation.value.id == "Optional":
            return _kind(inner, enums)
        if annotation.value.id == "Literal":
            words = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return str, tuple(str(one.value) for one in words if isinstance(one, ast.Constant))
        if annotation.value.id == "Union" and isinstance(inner, ast.Tuple):
            return next(
                (found for one in inner.elts if (found := _kind(one, enums))[0]), (None, None)
            )
    if isinstance(annotation, ast.Name):
        if annotation.id in enums:
            return str, enums[annotation.id]
        return _KINDS.get(annotation.id), None
    return None, None


def _flags(name: str, default: Any) -> tuple[str, ...]:
    words = name.replace("_", "-")
    return (f"--no-{words}", f"--disable-{words}") if default is True else (f"--{words}",)


def _declared(value: ast.expr | None) -> tuple[Any, tuple[str, ...]]:
    """Returns the default of a field, and what its metadata call it on the command line."""
    if not isinstance(value, ast.Call):
        return _default(value), ()
    given = {one.arg: one.value for one in value.keywords}
    metadata = _default(given.get("metadata")) or {}
    return _default(given.get("default")), tuple(
        metadata.get("argparse_meta", {}).get("arg_names", ())
    )


def _default(value: ast.expr | None) -> Any:
    if isinstance(value, ast.Attribute):  # a member of an enumeration
        return value.attr
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return None


def _help(node: ast.stmt) -> str:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return ""
    text = " ".join(str(node.value.value).split())
    return text.split(". ")[0].rstrip(".").replace("%", "%%")
