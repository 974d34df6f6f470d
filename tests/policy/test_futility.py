# SPDX-License-Identifier: Apache-2.0
"""Whether restarts are in vain is one decision of the job, whatever each process knows."""

from megatron_moevement.policy.outcome.futility import RESTARTS_IN_VAIN, Futility


def meet(knows, committed, processes=6):
    """Has processes meet; returns what each of them knows from then on."""
    agreed = Futility.agreed([each.document() for each in knows], committed, processes)
    return [agreed] * len(knows)


def meetings_until_over(steps_at, processes_at=lambda rejoin_barrier: 6, meetings=40):
    """Returns in which meeting each process finds that restarts are in vain.

    Args:
        steps_at: returns which newest steps the processes know of in a meeting.
        processes_at: returns how many processes there are in one.
        meetings: at the most.
    """
    knows = [Futility()] * len(steps_at(0))
    for rejoin_barrier in range(meetings):
        knows = meet(knows, steps_at(rejoin_barrier), processes_at(rejoin_barrier))
        over = {one.is_over for one in knows}
        assert len(over) == 1
        if over == {True}:
            return rejoin_barrier
    return None


def test_restarts_without_a_new_step_are_in_vain():
    assert meetings_until_over(lambda rejoin_barrier: [7, 7]) == RESTARTS_IN_VAIN


def test_a_step_that_only_one_process_knows_of_is_progress_for_all():
    # Each process by itself would have stopped in another meeting.
    assert meetings_until_over(lambda rejoin_barrier: [7, 8 if rejoin_barrier >= 3 else 7]) == (
        3 + RESTARTS_IN_VAIN
    )


def test_who_comes_in_new_adopts_what_the_others_know():
    knows = [Futility()] * 3
    for rejoin_barrier in range(RESTARTS_IN_VAIN + 1):
        knows[rejoin_barrier % 2] = Futility()
        knows = meet(knows, [4 if one == Futility() else 5 for one in knows[:2]] + [5])
    assert knows[0].is_over


def test_a_step_that_its_only_witness_forgot_is_no_progress_a_second_time():
    assert meetings_until_over(lambda rejoin_barrier: [7, 8 if rejoin_barrier % 2 else 7]) == (
        1 + RESTARTS_IN_VAIN
    )


def test_new_steps_are_progress():
    assert meetings_until_over(lambda rejoin_barrier: [rejoin_barrier, 0]) is None


def test_a_loss_is_progress():
    assert (
        meetings_until_over(
            lambda rejoin_barrier: [7, 7], lambda rejoin_barrier: 60 - rejoin_barrier
        )
        is None
    )
