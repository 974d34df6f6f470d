# SPDX-License-Identifier: Apache-2.0
"""The choice of W settles, keeps its limits, and is W = 1 where that fits."""

import dataclasses
import itertools
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_moevement.policy.watching.measurements import Measured
from megatron_moevement.policy.watching.window_choice import (
    COST_SHARE,
    STALL_SHARE,
    Reason,
    WindowChoice,
)

FULL_BYTES, COMPUTE_BYTES = 12_000_000, 2_000_000
MOST = 8


def slots_up_to(most, floor_bytes=0):
    """Returns the largest slot of each W, of equal operators, none smaller than one of them."""
    return {
        window: max(FULL_BYTES // window + COMPUTE_BYTES * (window - 1) // window, floor_bytes)
        for window in range(1, most + 1)
    }


SLOTS = slots_up_to(MOST)
slot_tables = st.builds(slots_up_to, st.integers(1, MOST), st.integers(0, FULL_BYTES // 2))
rates = st.floats(1e4, 1e9)
measurements = st.builds(
    Measured, st.none() | rates, st.none() | rates, st.floats(0.01, 10), st.floats(0, 5)
)


def plant(window, slots, to_host, to_holder, iteration_s, seen=1.0):
    """Returns what a job with W measures: it waits for what an iteration does not hide.

    Args:
        seen: how far off measured bandwidths are.
    """
    slowest = min(to_host, to_holder)
    stall_s = max(0.0, slots[window] / slowest - iteration_s)
    return Measured(to_host * seen, to_holder * seen, iteration_s, stall_s)


def windows_of(choice, slots, measure, count):
    found = [choice.window]
    for _ in range(count):
        choice = choice.after(measure(choice.window), slots, replicas=2)
        found.append(choice.window)
    return found


def shrinks(windows):
    return [pair for pair in changes(windows) if pair[0] > pair[1]]


def changes(windows):
    return [pair for pair in itertools.pairwise(windows) if pair[0] != pair[1]]


@given(slot_tables, st.data(), measurements)
def test_the_same_measurements_never_move_w_up_and_down(slots, data, measured):
    first = data.draw(st.sampled_from(sorted(slots)))
    windows = windows_of(WindowChoice(first), slots, lambda _: measured, 60)
    assert windows in (sorted(windows), sorted(windows, reverse=True))


@given(slot_tables, st.data(), rates, rates, st.floats(0.01, 10))
def test_a_job_on_a_steady_machine_settles_at_its_first_change(
    slots, data, to_host, to_holder, iteration_s
):
    first = data.draw(st.sampled_from(sorted(slots)))

    def measure(window):
        return plant(window, slots, to_host, to_holder, iteration_s)

    windows = windows_of(WindowChoice(first), slots, measure, 40)
    assert len(changes(windows)) <= 1
    budget = min(to_host, to_holder) * iteration_s
    if min(slots.values()) <= 0.9 * budget:
        assert measure(windows[-1]).stall_s <= STALL_SHARE * iteration_s
    assert windows[-1] == 1 or slots[1] > 0.7 * budget


@given(st.sampled_from(range(1, MOST + 1)), rates, st.floats(0.01, 10), st.floats(1, 4))
def test_wrong_measurements_move_w_ever_more_seldom(first, rate, iteration_s, seen):
    def measure(window):
        return plant(window, SLOTS, rate, rate, iteration_s, seen)

    windows = windows_of(WindowChoice(first), SLOTS, measure, 400)
    assert len(shrinks(windows)) <= 12
    assert len(shrinks(windows[200:])) <= 3


@given(slot_tables, st.data(), st.lists(measurements, max_size=60))
def test_w_is_always_one_that_the_job_may_come_to(slots, data, history):
    choice = WindowChoice(data.draw(st.sampled_from(sorted(slots))))
    for measured in history:
        choice = choice.after(measured, slots, replicas=2)
        assert choice.window in slots


@given(st.sampled_from(range(1, MOST + 1)), st.floats(0.01, 10), st.floats(1.4, 100))
def test_w_becomes_1_where_a_window_of_1_fits(first, iteration_s, spare):
    rate = SLOTS[1] * spare / iteration_s
    windows = windows_of(
        WindowChoice(first), SLOTS, lambda w: plant(w, SLOTS, rate, rate, iteration_s), 3
    )
    assert windows[-1] == 1


@given(st.sampled_from(range(1, MOST)), st.floats(0.01, 10), st.floats(1.001, 3.0))
def test_w_grows_at_the_first_edge_after_stalls_to_where_they_end(first, iteration_s, room):
    rate = SLOTS[MOST] / 0.9 * room / iteration_s
    measured = plant(first, SLOTS, rate, rate, iteration_s)
    assume(measured.stall_s > STALL_SHARE * iteration_s)
    grown = WindowChoice(first).after(measured, SLOTS, replicas=2)
    assert grown.window > first
    assert grown.reason is Reason.STALLS
    assert plant(grown.window, SLOTS, rate, rate, iteration_s).stall_s == 0


def test_a_stall_that_bandwidths_do_not_explain_counts_when_it_comes_again():
    stalled = Measured(1e9, 1e9, 1.0, 0.5)
    once = WindowChoice(4).after(stalled, SLOTS, replicas=2)
    assert (once.window, once.after(stalled, SLOTS, replicas=2).window) == (4, 5)
    calm = once.after(dataclasses.replace(stalled, stall_s=0.0), SLOTS, replicas=2)
    assert calm.after(stalled, SLOTS, replicas=2).window == 4


def test_slack_has_to_last_and_the_least_of_it_counts():
    calm = [Measured(rate, None, 1.0, 0.0) for rate in (1e8, 7.5e6, 1e8)]
    choice = WindowChoice(8)
    windows = []
    for measured in calm:
        choice = choice.after(measured, SLOTS, replicas=0)
        windows.append(choice.window)
    assert windows == [8, 8, 3]
    assert choice.reason is Reason.SLACK
    assert SLOTS[3] <= 0.75 * 7.5e6 < SLOTS[2]


def test_where_no_window_fits_w_comes_near_to_the_least_stall():
    slow = plant(2, SLOTS, 1e5, 1e5, 1.0)
    choice = WindowChoice(2).after(slow, SLOTS, replicas=2)
    assert (choice.window, choice.reason) == (8, Reason.NO_WINDOW_FITS)
    again = choice.after(plant(8, SLOTS, 1e5, 1e5, 1.0), SLOTS, replicas=2)
    assert (again.window, again.reason) == (8, Reason.NO_WINDOW_FITS)


@given(slot_tables, st.data(), st.floats(0.01, 0.99), st.floats(0.4, 100), st.floats(0.01, 10))
def test_a_link_too_slow_for_any_w_leaves_as_few_slots_as_the_host_admits(
    slots, data, of_smallest, of_largest, iteration_s
):
    to_holder = of_smallest * min(slots.values()) / iteration_s
    to_host = max(of_largest * max(slots.values()) / iteration_s, to_holder)
    stalled = Measured(to_host, to_holder, iteration_s, iteration_s)
    before = WindowChoice(data.draw(st.sampled_from(sorted(slots))))
    choice = before.after(stalled, slots, replicas=2)
    assert choice.reason is Reason.NO_WINDOW_FITS
    hidden = [w for w, size in slots.items() if size <= 0.9 * int(to_host * iteration_s)]
    if hidden and hidden[0] < max(slots):
        assert (choice.window, choice.used) == (max(slots), hidden[0])
    else:
        assert choice.used is None
    for measured in (stalled, dataclasses.replace(stalled, stall_s=0.0)) * 3:
        former, choice = choice, choice.after(measured, slots, replicas=2)
        assert (choice.window, choice.used) == (former.window, former.used)


def test_empty_slots_stay_while_the_others_are_hidden_and_end_with_a_link_that_is_faster():
    choice = WindowChoice(MOST, used=2)
    smallest = SLOTS[MOST] / 1.0
    barely = Measured(SLOTS[2] * 1.01, smallest / 2, 1.0, 1.0)
    assert choice.after(barely, SLOTS, replicas=2).used == 2
    less = dataclasses.replace(barely, to_host_bytes_per_s=SLOTS[2] * 0.99)
    assert choice.after(less, SLOTS, replicas=2).used == 3
    faster = Measured(1e9, SLOTS[4] / 0.74, 1.0, 0.0)
    for _ in range(3):
        choice = choice.after(faster, SLOTS, replicas=2)
    assert (choice.window, choice.used, choice.reason) == (4, None, Reason.SLACK)


@given(st.integers(2, MOST), st.floats(0.1, 10), st.floats(0.02, 2), st.booleans())
def test_a_smaller_w_that_lengthens_iterations_gives_way_to_the_smallest_that_costs_little(
    first, iteration_s, share, waits
):
    """Each captured byte takes the same time from training, by waits for a core that count."""
    byte_s = iteration_s * share / (SLOTS[1] - SLOTS[first])

    def measure(window):
        cost_s = byte_s * SLOTS[window]
        return Measured(1e12, 1e12, iteration_s + cost_s, 0.0, delay_s=cost_s if waits else None)

    shortest_s, least = iteration_s + byte_s * SLOTS[first], byte_s * SLOTS[MOST]
    costs = {window: byte_s * size - least for window, size in SLOTS.items()}
    assume(costs[1] - costs[first] > (COST_SHARE + 1e-6) * shortest_s)
    windows = windows_of(WindowChoice(first), SLOTS, measure, 400)
    assert windows[:6] == [first] * 3 + [1] * 3
    settled = [window for window in windows[6:] if window > 1]
    assert costs[settled[0]] <= (COST_SHARE + 1e-6) * shortest_s < costs[settled[0] - 1] + 1e-6
    assert settled == sorted(settled)  # of a shorter iteration the share is less
    assert len(shrinks(windows)) <= (3 if waits else 7)
    assert windows.count(1) <= (9 if waits else 24)


def test_a_smaller_w_with_slots_as_large_costs_what_it_costs():
    slots = {1: 100, 2: 100}
    choice = WindowChoice(2)
    for iteration_s in (1.0, 1.0, 1.0, 1.5, 1.5, 1.5):
        choice = choice.after(Measured(1e12, 1e12, iteration_s, 0.0), slots, replicas=2)
    assert (choice.window, choice.reason) == (2, Reason.COSTS)


@given(st.integers(2, MOST), st.lists(st.floats(1, 1.009), min_size=40, max_size=40))
def test_a_smaller_w_that_costs_little_is_kept(first, noise):
    history = [Measured(1e12, 1e12, each, 0.0) for each in noise]
    choice = WindowChoice(first)
    for measured in history:
        choice = choice.after(measured, SLOTS, replicas=2)
    assert choice.window == 1


def test_one_slow_window_does_not_give_a_smaller_w_up():
    choice = WindowChoice(4)
    for iteration_s in (1.0, 1.0, 1.0, 1.5, 1.0, 1.5, 1.5, 1.5):
        choice = choice.after(Measured(1e12, 1e12, iteration_s, 0.0), SLOTS, replicas=2)
    assert choice.window == 1
    choice = WindowChoice(4)
    for iteration_s in (1.0, 1.0, 1.0, 1.5, *[1.02, 1.02, 1.5] * 3, 1.02, 1.02):
        assert choice.window == (4 if iteration_s == 1.0 else 1)
        choice = choice.after(Measured(1e12, 1e12, iteration_s, 0.0), SLOTS, replicas=2)
    # Of W = 3 an iteration would be 0.0056 longer than of W = 8, of W = 2 0.01.
    assert (choice.window, choice.reason) == (3, Reason.COSTS)


def noisy(seed, window, noise, cost=0.0, count=60, odd=None, waits=None):
    """Returns the W of each window of a job that begins with one.

    Args:
        noise: by which an iteration is longer or shorter at most.
        cost: by which it is longer with W = 1.
        odd: the number of a window that was disturbed, and how many times as long it was.
        waits: by which passes wait longer for cores with W = 1; None: nobody counts that.
    """
    draw, choice = random.Random(seed), WindowChoice(window)
    found = [window]
    for number in range(count):
        iteration_s = (1 + cost * (found[-1] == 1)) * (1 + draw.uniform(-noise, noise))
        if odd is not None and odd[0] == number:
            iteration_s *= odd[1]
        delay_s = None if waits is None else 0.1 + waits * (found[-1] == 1)
        measured = Measured(1e12, 1e12, iteration_s, 0.0, delay_s=delay_s)
        choice = choice.after(measured, SLOTS, replicas=2)
        found.append(choice.window)
    return found


@pytest.mark.parametrize("times", [0.8, 1.5])
@pytest.mark.parametrize("place", range(8))
def test_no_single_window_gives_a_smaller_w_up(times, place):
    for seed in range(40):
        assert changes(noisy(seed, 4, 0.004, odd=(place, times))) == [(4, 1)]


@pytest.mark.parametrize("times", [0.8, 1.0, 1.5])
@pytest.mark.parametrize("place", range(8))
def test_a_smaller_w_that_costs_5_percent_is_given_up_whatever_one_window_takes(times, place):
    for seed in range(40):
        windows = noisy(seed, 4, 0.01, 0.05, odd=(place, times))
        assert windows[:6] == [4] * 3 + [1] * 3
        assert max(windows[6:16]) > 1


def test_what_windows_differ_by_anyway_keeps_w_from_nothing():
    settled = [noisy(seed, 4, 0.08, count=100)[-1] for seed in range(100)]
    assert settled.count(1) >= 97


def test_what_is_longer_as_passes_wait_for_cores_is_given_up_at_once():
    def given_up(waits):
        return sum(noisy(seed, 4, 0.08, 0.12, waits=waits)[6] > 1 for seed in range(100))

    assert given_up(waits=0.05) >= 97
    assert given_up(waits=None) < 65
    assert changes(noisy(0, 4, 0.0, waits=0.5)) == [(4, 1)]  # waits alone cost nothing


def after_all(choice, iterations_s, rate):
    """Returns the choice after windows without stalls."""
    for iteration_s in iterations_s:
        choice = choice.after(Measured(rate, rate, iteration_s, 0.0), SLOTS, replicas=2)
    return choice


def test_what_iterations_took_long_ago_gives_no_smaller_w_up():
    """Until the link is faster no smaller W fits, while iterations become longer."""
    choice = after_all(WindowChoice(4), [0.9] * 30 + [1.0] * 12, 6.5e6)
    assert choice.window == 4
    assert after_all(choice, [1.0] * 3, 1e12).window == 1
    assert after_all(choice, [1.0] * 20, 1e12).window == 1


def test_an_even_smaller_w_waits_for_the_end_of_a_trial():
    tried = after_all(WindowChoice(4), [1.0] * 3, 1e7)
    undecided = after_all(tried, [1.0, 1.2, 1.1], 1e12)
    assert (tried.window, undecided.window) == (2, 2)
    assert after_all(undecided, [1.0, 1.0], 1e12).window == 1


def contended(window, byte_s, iteration_s=1.0):
    """Returns what a job measures that has no core free: captured bytes take time from it."""
    return Measured(1e12, 1e12, iteration_s, 0.0, byte_s * SLOTS[window])


def cost_shares(byte_s):
    """Returns for each W by which share iterations are longer than with the largest W."""
    return {window: byte_s * (size - SLOTS[MOST]) for window, size in SLOTS.items()}


@given(
    st.sampled_from(range(1, MOST + 1)),
    st.floats(1e-10, 1e-7),
    st.lists(st.floats(0.9, 1.1), min_size=60, max_size=60),
)
def test_cpu_times_keep_w_from_what_it_would_cost_whatever_iterations_take(first, byte_s, noise):
    costs = cost_shares(byte_s)
    choice = WindowChoice(first)
    windows = []
    for iteration_s in noise:
        choice = choice.after(contended(choice.window, byte_s, iteration_s), SLOTS, replicas=2)
        windows.append(choice.window)
    smaller = [window for window in windows[2:] if window < first]
    assert all(costs[window] <= COST_SHARE * 0.75 * 1.1 * 1.001 for window in smaller)
    if costs[first] > COST_SHARE * 1.1:
        assert windows[:2] == [first] * 2
        assert windows[2] > first
        assert costs[windows[2]] <= COST_SHARE * 0.9 * 1.1 * 1.001


@given(st.sampled_from(range(1, MOST + 1)), st.floats(1e-10, 1e-7))
def test_a_job_without_free_cores_settles_at_the_smallest_w_that_costs_little(first, byte_s):
    costs = cost_shares(byte_s)
    windows = windows_of(WindowChoice(first), SLOTS, lambda w: contended(w, byte_s), 40)
    assert len(changes(windows)) <= 1
    settled = windows[-1]
    assert costs[settled] <= COST_SHARE * 1.001
    assert settled == 1 or costs[settled - 1] > COST_SHARE * 0.75 * 0.999


def test_memory_that_is_touched_for_the_first_time_does_not_make_w_larger():
    cheap, dear = contended(4, 1e-9), contended(4, 1e-7)
    choice = WindowChoice(4)
    for measured in (dear, dear, cheap):
        choice = choice.after(measured, SLOTS, replicas=2)
        assert choice.window == 4
    for measured in (dear, dear, dear):
        choice = choice.after(measured, SLOTS, replicas=2)
    assert (choice.window, choice.reason) == (8, Reason.COSTS)


def test_empty_slots_cost_as_little_as_they_hold():
    """W = 8 with two slots filled captures as much in a step as two eighths of the larger one."""
    choice = WindowChoice(MOST, used=2)
    mean_bytes, byte_s = SLOTS[2] * 2 // 8, 3e-9
    measured = Measured(1e12, 1e12, 1.0, 0.0, byte_s * mean_bytes)
    for _ in range(3):
        choice = choice.after(measured, SLOTS, replicas=2)
    costs = cost_shares(byte_s)
    assert (choice.window, choice.used, choice.reason) == (3, None, Reason.SLACK)
    assert costs[3] <= 0.75 * COST_SHARE < costs[2]


@given(st.floats(0, 1), st.integers(1, MOST - 1))
def test_links_too_slow_for_any_w_keep_empty_slots_whatever_they_cost(contention_s, used):
    """Of few operators the slots that are filled may be larger on average than those of W = 8."""
    slots = {window: -(-MOST // window) * 100 for window in range(1, MOST + 1)}
    measured = Measured(slots[used] * 1.2, 25.0, 1.0, 0.0, contention_s)
    choice = WindowChoice(MOST, used=used)
    for _ in range(12):
        choice = choice.after(measured, slots, replicas=2)
        assert (choice.window, choice.used) == (MOST, used)


def test_what_led_to_a_choice_counts_for_the_w_in_force_alone():
    choice = WindowChoice(4, slack_windows=2)
    assert WindowChoice.under(4, None, choice) is choice
    assert WindowChoice.under(3, None, choice) == WindowChoice(3)
    assert WindowChoice.under(4, 2, choice) == WindowChoice(4, 2)
    assert WindowChoice.under(4, None, None) == WindowChoice(4)


def test_nothing_is_chosen_before_anything_was_captured():
    assert WindowChoice(4).after(Measured(None, 1e6, 1.0, 1.0), SLOTS, 2) == WindowChoice(4)
