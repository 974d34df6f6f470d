# SPDX-License-Identifier: Apache-2.0
"""Each patch is needed: its test fails on the tree without it and passes on the tree with it."""

import os
import shutil
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from megatron_moevement.integrations.megatron.fork.series import load_series
from megatron_moevement.integrations.megatron.fork.tree import apply_series

LAST = len(load_series().patches)
PRELOAD = "from tests.harness import fork_server_preload as hook; hook.import_megatron()"


@pytest.fixture(scope="module")
def compiled(pristine, request, tmp_path_factory):
    """The pristine release with the bytecode of what tests import: compiling takes seconds."""
    folder = shutil.copytree(pristine, tmp_path_factory.mktemp("compiled") / "tree")
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-W", "ignore", "-c", PRELOAD]
    subprocess.run(command, cwd=request.config.rootpath, env=environment, check=True)
    return folder


@pytest.fixture
def tree(compiled, tmp_path):
    return shutil.copytree(compiled, tmp_path / "tree")


def outcomes(root, tree, tests, report):
    """Runs tests against the Megatron-Core in `tree`; returns whether each passed, by name."""
    command = [sys.executable, "-m", "pytest", "--quiet", "--override-ini", "addopts="]
    command += ["-p", "no:cacheprovider", "--import-mode=importlib", f"--junit-xml={report}"]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    result = subprocess.run(
        [*command, *tests], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    cases = ElementTree.parse(report).iter("testcase")
    found = {case.get("name"): len(case) == 0 for case in cases}
    assert set(found) == {test.rpartition("::")[2] for test in tests}, result.stdout
    return found


def test_every_patch_is_missing_from_the_pristine_tree(series, compiled, request, tmp_path):
    tests = [patch.test for patch in series.patches]
    found = outcomes(request.config.rootpath, compiled, tests, tmp_path / "report.xml")
    assert found == dict.fromkeys((test.rpartition("::")[2] for test in tests), False)


@pytest.mark.slow
@pytest.mark.parametrize("applied", range(LAST + 1))
def test_a_patch_makes_its_test_pass_and_the_next_one_is_missing(
    applied, series, tree, request, tmp_path
):
    apply_series(tree, series.patches[:applied])
    with_it = [patch.test for patch in series.patches[:applied][-1:]]
    without_it = [patch.test for patch in series.patches[applied:][:1]]
    found = outcomes(
        request.config.rootpath, tree, [*with_it, *without_it], tmp_path / "report.xml"
    )
    expected = dict.fromkeys((test.rpartition("::")[2] for test in with_it), True)
    expected |= dict.fromkeys((test.rpartition("::")[2] for test in without_it), False)
    assert found == expected
