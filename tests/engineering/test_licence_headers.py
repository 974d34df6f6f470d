# SPDX-License-Identifier: Apache-2.0
"""Each source file names its licence, and the script that writes it changes nothing else."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "engineering" / "licence_headers.py"
HEADER = "# SPDX-License-Identifier: Apache-2.0\n"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("licence_headers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_source_file_has_the_header():
    command = [sys.executable, SCRIPT, "--check"]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")


def test_scripts_of_all_kinds_are_looked_at(script):
    found = {path.relative_to(ROOT).as_posix() for path in script.sources()}
    assert {"setup.py", "scripts/train_moe.sbatch", ".ci/run", "Dockerfile"} <= found
    assert "tests/engineering/test_licence_headers.py" in found
    assert "megatron_moevement/cli/page/page.css" in found


@pytest.mark.parametrize("first", ["", "#!/bin/sh\n", "# syntax=docker/dockerfile:1\n"])
@pytest.mark.parametrize("rest", ["", "text\n", '"""Docstring."""\n\nx = 1\n'])
def test_the_header_follows_what_must_be_first_and_is_written_once(script, first, rest):
    once = script.with_header(first + rest)
    assert once == first + HEADER + rest
    assert script.with_header(once) == once


@pytest.mark.parametrize(
    ("suffix", "text", "header"),
    [
        (".js", "let a;\n", "// SPDX-License-Identifier: Apache-2.0\n"),
        (".css", "a {}\n", "/* SPDX-License-Identifier: Apache-2.0 */\n"),
    ],
)
def test_comments_are_those_of_the_language(script, suffix, text, header):
    assert script.with_header(text, suffix) == header + text
    page = "<!DOCTYPE html>\n<p>\n"
    first, second, third = script.with_header(page, ".html").splitlines()
    assert (first, second, third) == ("<!DOCTYPE html>", f"<!-- {script.HEADER} -->", "<p>")
