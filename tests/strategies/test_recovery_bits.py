# SPDX-License-Identifier: Apache-2.0
"""A job all of whose processes are killed goes on from their memory, with the same bits.

One test body over combinations of layout, precision, optimizer, experts, window, copies and the
rest. Every second death comes from outside, at a random moment, the others at a place of a step
that is drawn. A few run by default; a set in which every two settings meet is marked slow and runs
by one command:

    ./scripts/recovery_campaign.sh
"""

from random import Random

import pytest

from megatron_moevement.settings.faults import FaultPoint
from tests.harness.combinations import FACTORS, Combination
from tests.harness.interruption import Run, digest_differences
from tests.harness.pairwise import cover_pairs
from tests.harness.protected_run import (
    Case,
    check_replays,
    die,
    kill_at_random,
    next_death,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

PROTECTION = {"window": ["1", "2", "4", "5"], "replicas": ["2", "1", "0"]}
NOT_ALWAYS_PASSED = (
    FaultPoint.BOUNDARY_SEND,  # not without stages
    FaultPoint.OPTIMIZERS,  # not in a step that overflows
    FaultPoint.WINDOW_EDGE,
    FaultPoint.SEND,  # not without copies
    FaultPoint.FETCH,
    FaultPoint.REPLAY,
    FaultPoint.DENSE,
    FaultPoint.SAVE,
)
PLACES = [place for place in FaultPoint if place.is_of_step and place not in NOT_ALWAYS_PASSED]
QUICK = (
    Case.of("edp3 fp16 distributed bias", 3),
    Case.of("pp2-ep2 bf16 distributed-overlap grouped global-aux linear", 2),
    Case.of("dense vpp2 bf16 distributed dropout", 3),
)
EXAMPLES = (
    *QUICK,
    Case.of("vpp2 fp16 replicated grouped", 2),
    Case.of("pp2-ep2 bf16 distributed grouped", 5),
    Case.of("tp2 fp32 seq-aux recomputed evaluation", 3),
    Case.of("edp3 bf16 replicated-overlap allgather", 1),
    Case.of("dense tp2 fp16 replicated recomputed", 2),
)
COVER = tuple(
    Case(
        Combination(tuple(row[name] for name in FACTORS)),
        window=int(row["window"]),
        replicas=int(row["replicas"]),
        deaths=3,
    )
    for row in cover_pairs(FACTORS | PROTECTION)
)
CASES = [
    *(
        pytest.param(case, id=case.name, marks=[] if case in QUICK else [pytest.mark.slow])
        for case in EXAMPLES
    ),
    *(
        pytest.param(case, id=f"cover{number:02}-{case.name}", marks=pytest.mark.slow)
        for number, case in enumerate(COVER)
    ),
]


@pytest.mark.parametrize("case", CASES)
def test_a_job_whose_processes_are_all_killed_ends_with_the_bits_of_one_that_is_not(
    megatron_fork_server, text, uninterrupted, tmp_path, case
):
    random = Random(case.name)
    run = Run(case.protected_program(megatron_fork_server, text), tmp_path)
    for death in range(case.deaths):
        step = next_death(run, case) + random.randint(0, 1)
        if death % 2:
            die(run, case, random.choice(PLACES), [step])
        else:
            kill_at_random(run, case, step, random)
    assert digest_differences(run.finish(), uninterrupted(case)) == []
    check_replays(run, case, launches=case.deaths)
    assert list(run.store.rglob("*")) == []


def test_every_two_settings_meet_in_the_cover():
    seen = {
        (one, other)
        for case in COVER
        for levels in ([*case.combination.levels, f"W{case.window}", f"r{case.replicas}"],)
        for one in levels
        for other in levels
    }
    factors = [
        *FACTORS.values(),
        [f"W{window}" for window in PROTECTION["window"]],
        [f"r{replicas}" for replicas in PROTECTION["replicas"]],
    ]
    for number, factor in enumerate(factors):
        for other in factors[number + 1 :]:
            assert {(one, two) for one in factor for two in other} <= seen
