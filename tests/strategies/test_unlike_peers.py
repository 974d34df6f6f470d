# SPDX-License-Identifier: Apache-2.0
"""A replay in which expert-parallel ranks begin to train in different layers.

With the distributed optimizer one of them holds most of the embedding, so that its experts are
packed into other slots of the window than those of its peer.
"""

from collections import defaultdict
from random import Random

import pytest

from megatron_moevement.runtime.observation.events import EventName, read_events
from tests.harness.interruption import Run, digest_differences
from tests.harness.localized_run import (
    TARGET,
    LocalizedJob,
    LocalizedRun,
    Loss,
    differences,
)
from tests.harness.protected_run import Case
from tests.harness.restarted_run import (
    await_step,
    events_of,
    kill_rank,
    restartable_program,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

WIDE = (
    "--hidden-size=128",
    "--ffn-hidden-size=256",
    "--make-vocab-size-divisible-by=1024",
)
"""With it the dense operators weigh more than the experts, and the embedding most."""
UNTIED = "--untie-embeddings-and-output-weights"
EP2 = LocalizedJob.of(
    "pp2-ep2 fp32 distributed",
    2,
    1,
    3,
    "--pipeline-model-parallel-size=1",
    *WIDE,
)
TRAIN_ITERS = TARGET + 2


def check_unlike(replays):
    """Checks that in a replayed step a rank of the stage trains something, and its peer nothing."""
    active = defaultdict(set)
    for event in replays:
        active[event.iteration].add(event.fields["active"])
    assert any(min(counts) == 0 < max(counts) for counts in active.values()), active


def test_both_ranks_replay_and_no_bit_differs(
    megatron_fork_server, plainly_trained, text, tmp_path
):
    run = LocalizedRun(megatron_fork_server, EP2, text, TRAIN_ITERS, tmp_path)
    loss = Loss((1,), (0,), verdict="GLOBAL")
    found = run.train([loss])
    assert differences(found, plainly_trained(EP2, TRAIN_ITERS)) == []
    events = [
        event for event in read_events(run.folder / "events") if event.event is EventName.REPLAY
    ]
    check_unlike(events)
    assert len(events) == 2 * len({event.iteration for event in events}) >= 4
    run.check([loss], found)


CASES = {
    "bf16": ((UNTIED, "--num-layers=4", *WIDE), 3),
    "default-window": ((UNTIED, "--num-layers=4", *WIDE), 4),
    "recomputed": (
        (
            UNTIED,
            "--num-layers=4",
            *WIDE,
            "--recompute-granularity=full",
            "--recompute-method=uniform",
            "--recompute-num-layers=1",
        ),
        3,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_spare_replays_the_stage_of_a_killed_peer(megatron_fork_server, text, tmp_path, name):
    flags, window = CASES[name]
    case = Case.of("pp2-ep2 bf16 distributed", window)
    expected = Run(case.program(megatron_fork_server, text, *flags), tmp_path / "plain").finish()
    program = restartable_program(
        case, megatron_fork_server, text, 1, "--moevement-replicas=1", *flags
    )
    run = Run(program, tmp_path / "killed")
    with run.start() as job:
        await_step(run, job, case.protected_from)
        kill_rank(run, job, 1, Random(name))
        result = job.wait()
    assert sorted(result.exit_codes) == [-9, 0, 0, 0, 0], result.describe()
    assert digest_differences(run._digest(), expected) == []
    assert {plan.fields["verdict"] for plan in events_of(run, EventName.PLAN, 1)} == {"LOCALIZED"}
    replays = events_of(run, EventName.REPLAY, 1)
    check_unlike(replays)
    assert {event.logical_rank for event in replays} == {0, 1}
    assert all(event.fields["replay_verified"] for event in replays)
    for event in events_of(run, EventName.RECOVERED, 1):
        steps = event.fields["replayed_steps"]
        assert steps >= case.window - 1 if event.logical_rank < 2 else steps == 0
