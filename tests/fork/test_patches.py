"""Each patch is needed: its test fails on the tree without it and passes on the tree with it."""

import os
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from megatron_moevement.integrations.megatron.fork.series import load_series
from megatron_moevement.integrations.megatron.fork.tree import apply_series


def outcomes(root, tree, tests, report):
    """Runs tests against the Megatron-Core in `tree`; returns whether each passed, by name."""
    command = [sys.executable, "-m", "pytest", "--quiet", "--override-ini", "addopts="]
    command += ["-p", "no:cacheprovider", "--import-mode=importlib", f"--junit-xml={report}"]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(
        [*command, *tests], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    cases = ElementTree.parse(report).iter("testcase")
    found = {case.get("name"): len(case) == 0 for case in cases}
    assert set(found) == {test.rpartition("::")[2] for test in tests}, result.stdout
    return found


@pytest.mark.parametrize("applied", range(len(load_series().patches) + 1))
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
