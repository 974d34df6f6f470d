# SPDX-License-Identifier: Apache-2.0
"""The line of a rank's memory has the form that scripts for Megatron-LM read."""

import re

import torch

from megatron_moevement.training.reporting.memory import memory_line


def test_the_line_has_the_rank_the_iteration_and_mebibytes():
    held = torch.ones(1 << 23)
    line = memory_line(3, 7, torch.device("cpu"))
    found = re.fullmatch(
        r"\[Rank 3\] \(after 7 iterations\) memory \(MB\) \| resident: ([\d.]+) "
        r"\| max resident: ([\d.]+)",
        line,
    )
    resident, peak = map(float, found.groups())
    assert held.nbytes / (1 << 20) < resident <= peak
