# SPDX-License-Identifier: Apache-2.0
"""Sizes, names, light packages and layers: what a review would otherwise have to look for."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("megatron_moevement", "scripts", "benchmarks", "tests")
FILES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
FORBIDDEN_NAMES = {"common", "helper", "helpers", "manager", "misc", "util", "utils"}
PACKAGES = sorted((ROOT / "megatron_moevement").rglob("__init__.py"))
HEAVY = ("matplotlib", "megatron", "numpy", "rich", "tensorboard", "tokenizers", "torch")


def relative(file):
    return str(file.relative_to(ROOT))


def functions(file):
    """Yields name and number of lines, decorators not counted, of every function of a file."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.end_lineno - node.lineno + 1


def words(name):
    """Splits a module's or class's name: `CacheManager` and `cache_manager` into two words."""
    spaced = "".join(f"_{letter}" if letter.isupper() else letter for letter in name)
    return set(spaced.lower().strip("_").split("_"))


def imported_by(statement, watched):
    """Returns which of the watched modules a fresh interpreter has after a statement."""
    code = f"import sys; {statement}; print(*sorted(set(sys.modules) & {set(watched)!r}))"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return result.stdout.split()


def test_files_have_at_most_400_lines():
    texts = {relative(file): file.read_text(encoding="utf-8") for file in FILES}
    sizes = {  # the licence at their head not counted
        name: len(text.splitlines()) - text.count("# SPDX-License-Identifier: ", 0, 100)
        for name, text in texts.items()
    }
    assert {name: lines for name, lines in sizes.items() if lines > 400} == {}


def test_functions_have_at_most_60_lines():
    sizes = {f"{relative(file)}:{name}": lines for file in FILES for name, lines in functions(file)}
    assert {name: lines for name, lines in sizes.items() if lines > 60} == {}


def test_no_module_or_class_has_a_name_that_says_nothing():
    named = {relative(file): file.stem for file in FILES}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                named[f"{relative(file)}:{node.name}"] = node.name
    for folder in {file.parent for file in FILES}:
        named[relative(folder)] = folder.name
    assert [place for place, name in named.items() if words(name) & FORBIDDEN_NAMES] == []


def test_the_checks_above_see_what_they_look_for(tmp_path):
    long = tmp_path / "long.py"
    long.write_text("def f():\n" + "    x = 1\n" * 60)
    assert list(functions(long)) == [("f", 61)]
    assert words("CacheManager") & FORBIDDEN_NAMES == {"manager"}
    assert words("string_utils") & FORBIDDEN_NAMES == {"utils"}
    assert imported_by("import json", ["json"]) == ["json"]
    assert len(FILES) > 40


def test_every_module_opens_with_a_docstring():
    trees = {relative(file): ast.parse(file.read_text(encoding="utf-8")) for file in FILES}
    assert [name for name, tree in trees.items() if not ast.get_docstring(tree)] == []


@pytest.mark.parametrize("package", PACKAGES, ids=relative)
def test_importing_a_package_imports_nothing_heavy(package):
    name = ".".join(package.parent.relative_to(ROOT).parts)
    assert imported_by(f"import {name}", HEAVY) == []


def test_the_launcher_and_the_builder_import_nothing_heavy():
    fork = "megatron_moevement.integrations.megatron.fork"
    modules = ["megatron_moevement.cli.launch", f"{fork}.__main__", f"{fork}.marker"]
    assert imported_by(f"import {', '.join(modules)}", HEAVY) == []


def test_the_command_imports_nothing_heavy_before_it_launches():
    launched = "from megatron_moevement.cli import build_parser; build_parser(['launch'])"
    assert imported_by(launched, HEAVY) == []


def test_the_policy_imports_the_standard_library_alone():
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in sorted((ROOT / "megatron_moevement" / "policy").rglob("*.py"))
        if file.stem != "__init__"
    ]
    assert imported_by(f"import megatron_moevement.policy, {', '.join(modules)}", HEAVY) == []


@pytest.mark.parametrize("layer", ["policy", "runtime", "strategies"])
def test_a_room_has_about_a_dozen_files(layer):
    folder = ROOT / "megatron_moevement" / layer
    rooms = Counter(path.parent for path in folder.rglob("*.py") if path.stem != "__init__")
    assert {str(room): count for room, count in rooms.items() if count > 12} == {}


def test_the_layers_hold():
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
