# SPDX-License-Identifier: Apache-2.0
"""What a rank says of its work to whoever watches it."""

from datetime import timedelta

from megatron_moevement.policy.watching.section_limits import OUTSIDE
from megatron_moevement.runtime.observation.watch import Moment, Section, Watch, Work


class Heard(Watch):
    def __init__(self, warm_up=0):
        super().__init__(warm_up)
        self.said = []

    def beat(self):
        self.said.append("beat")

    def opened(self, section):
        self.said.append(f"{section.value} begins")

    def closed(self, section):
        self.said.append(f"{section.value} ends")


def step(watch, work=Work.TRAINING):
    watch.begin_step(work)
    watch.end_step(work)


def test_a_step_ends_the_set_up_and_is_a_section_once_it_is_warm():
    watch = Heard(warm_up=1)
    watch.restart()
    step(watch)
    step(watch)
    assert watch.said == ["beat", "setup ends", "beat", "step begins", "step ends"]


def test_iterations_of_an_evaluation_are_steps_that_begin_cold():
    watch = Heard(warm_up=1)
    for _ in range(2):
        watch.begin_evaluation()
        step(watch, Work.EVALUATION)
        step(watch, Work.EVALUATION)
    assert watch.said == ["beat", "beat", "step begins", "step ends"] * 2


def test_a_save_is_a_section_of_its_own():
    watch = Heard()
    watch.restart()
    watch.begin_save()
    watch.end_save()
    assert watch.said == ["beat", "setup ends", "checkpointing begins", "checkpointing ends"]


def test_a_save_that_is_written_beside_training_may_be_waited_for_as_long():
    watch = Watch()
    watch.begin_save()
    watch.end_save(timedelta(hours=1))
    assert watch.longest_s(Moment.SAVED)[Section.CHECKPOINTING.value] == 3600.0


def test_after_an_interrupt_whatever_was_open_is_the_set_up():
    watch = Heard()
    watch.begin_step()
    watch.restart()
    watch.said.clear()
    step(watch)
    assert watch.said == ["beat", "setup ends", "step begins", "step ends"]


def test_times_count_when_enough_was_seen_and_those_outside_at_the_end_only():
    watch = Heard()
    watch.restart()
    assert set(watch.longest_s(Moment.SAVED).values()) == {None}
    for _ in range(16):
        step(watch)
    watch.begin_save()
    watch.end_save()
    seen = watch.longest_s(Moment.END)
    assert [name for name, time in seen.items() if time is None] == ["setup", OUTSIDE]
    watch.loaded()
    assert None not in watch.longest_s(Moment.END).values()
    assert watch.longest_s(Moment.SAVED)[OUTSIDE] is None
    assert set(seen) == {section.value for section in Section} | {OUTSIDE}
