"""A job all of whose processes are killed goes on from their memory, with the same bits.

One test body over combinations of layout, precision, optimizer, experts, window and the rest. A few
run by default; a set in which every two settings meet is marked slow and runs by one command:

    ./scripts/recovery_campaign.sh
"""

from random import Random

import pytest

from megatron_moevement.testing.combinations import cover
from megatron_moevement.testing.interruption import Run, digest_differences
from megatron_moevement.testing.protected_run import Case, check_replays

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

WINDOWS = (1, 2, 3, 5)
EXAMPLES = (
    Case.of("edp3 fp16 distributed bias", 3),
    Case.of("vpp2 fp16 replicated grouped", 2),
    Case.of("pp2-ep2 bf16 distributed grouped", 5),
    Case.of("tp2 fp32 seq-aux recomputed evaluation", 3),
    Case.of("pp2-dp2-ep2 bf16 distributed-overlap grouped global-aux linear", 2),
    Case.of("edp3 bf16 replicated-overlap allgather", 1),
)
COVER = tuple(
    Case(combination, WINDOWS[number % len(WINDOWS)]) for number, combination in enumerate(cover())
)
CASES = [
    *(pytest.param(case, id=case.name) for case in EXAMPLES),
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
    step = case.protected_from + random.randint(0, 1)
    run.kill(step, random)
    run.kill(step + 2 + random.randint(0, 1), random)
    assert digest_differences(run.finish(), uninterrupted(case)) == []
    check_replays(run, case, launches=2)
    assert list(run.store.rglob("*")) == []
