# SPDX-License-Identifier: Apache-2.0
"""The loop: what is done after which iteration, and when it ends."""

import gc
import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.harness.tiny_job import TINY, tiny_job

pytestmark = pytest.mark.distributed

PROGRAM = Path(__file__).parents[2] / "pretrain_moe.py"
VISIBLE = ("iteration", "evaluation", "checkpoint_saved")


def train(folder, flags, duration_s=None, signal_in=None, signalled=None):
    """Trains a job; returns how far each rank came and what it did, in order.

    In iteration `signal_in` the ranks of `signalled` send themselves SIGTERM.
    """
    from megatron_moevement.runtime.coordination.generation import Generation  # noqa: PLC0415
    from megatron_moevement.training.loop import train as run_loop  # noqa: PLC0415
    from megatron_moevement.training.resident import Resident  # noqa: PLC0415
    from megatron_moevement.training.stop_request import StopSources  # noqa: PLC0415

    reporting = [f"--moevement-event-dir={folder}/events", "--log-interval=1"]
    stop = StopSources(None if duration_s is None else timedelta(seconds=duration_s))
    handler = signal.getsignal(signal.SIGTERM)
    with tiny_job(*reporting, *flags) as job, stop.listening():
        if signal_in is not None and dist.get_rank() in signalled:
            terminate_in(job, signal_in)
        resident = Resident(job.arguments, job.backend)
        ending = run_loop(job, stop, resident, Generation())
        done = events(folder)
    assert signal.getsignal(signal.SIGTERM) == handler
    return [ending.progress.committed, done]


def terminate_in(job, iteration):
    """Lets this process receive SIGTERM in the middle of an iteration."""
    forward_backward, calls = job.schedule.forward_backward, []

    def interrupted(micro_batches, *args):
        calls.append(1)
        if len(calls) == iteration:
            os.kill(os.getpid(), signal.SIGTERM)
        return forward_backward(micro_batches, *args)

    job.schedule.forward_backward = interrupted


def events(folder):
    """Returns what this process did: name and iteration, and the split of an evaluation."""
    from megatron_moevement.runtime.observation.events import read_events  # noqa: PLC0415

    return [
        " ".join([one.event.value, str(one.iteration), *one.fields.get("split", "").split()])
        for one in read_events(f"{folder}/events")
        if one.pid == os.getpid() and one.event.value in VISIBLE
    ]


def outcome(server, folder, flags, ranks=2, **options):
    """Returns how far the job came and what it did, which all ranks must agree on."""
    names = ("duration_s", "signal_in", "signalled")
    args = [str(folder), flags, *(options.get(name) for name in names)]
    values = server.run(train, world_size=ranks, args=args).check().values
    assert all(value == values[0] for value in values)
    return values[0]


def iterations(first, last):
    return [f"iteration {number}" for number in range(first, last + 1)]


def saved_in(folder):
    return sorted(path.name for path in (folder / "save").glob("iter_*"))


@pytest.fixture
def save(tmp_path):
    return f"--save={tmp_path}/save"


EVALUATED = ["--eval-iters=1", "--eval-interval=3", "--train-iters=7"]


def test_after_an_iteration_comes_its_evaluation_then_its_checkpoint(
    megatron_fork_server, tmp_path, save
):
    flags = [*EVALUATED, save, "--save-interval=3"]
    committed, done = outcome(megatron_fork_server, tmp_path, flags)
    assert committed == 7
    assert done == [
        *iterations(1, 3),
        *("evaluation 3 validation", "checkpoint_saved 3"),
        *iterations(4, 6),
        *("evaluation 6 validation", "checkpoint_saved 6"),
        *iterations(7, 7),
        *("checkpoint_saved 7", "evaluation 7 validation", "evaluation 7 test"),
    ]
    assert saved_in(tmp_path) == ["iter_0000003", "iter_0000006", "iter_0000007"]


def test_without_a_folder_nothing_is_saved_and_without_iterations_nothing_evaluated(
    megatron_fork_server, tmp_path
):
    committed, done = outcome(megatron_fork_server, tmp_path, ["--train-iters=3"])
    assert (committed, done) == (3, iterations(1, 3))


def test_the_last_iteration_is_not_saved_twice(megatron_fork_server, tmp_path, save):
    flags = ["--train-iters=4", save, "--save-interval=2"]
    _, done = outcome(megatron_fork_server, tmp_path, flags)
    assert done == [
        *(*iterations(1, 2), "checkpoint_saved 2"),
        *(*iterations(3, 4), "checkpoint_saved 4"),
    ]


def test_checkpoints_between_those_to_be_kept_go_when_a_newer_one_is_there(
    megatron_fork_server, tmp_path, save
):
    flags = ["--train-iters=5", save, "--save-interval=1", "--save-retain-interval=2"]
    _, done = outcome(megatron_fork_server, tmp_path, flags, ranks=1)
    assert [each for each in done if each.startswith("checkpoint_saved")] == [
        f"checkpoint_saved {iteration}" for iteration in range(1, 6)
    ]
    assert saved_in(tmp_path) == ["iter_0000002", "iter_0000004", "iter_0000005"]


def test_an_exit_interval_saves_and_ends_without_the_final_evaluation(
    megatron_fork_server, tmp_path, save
):
    flags = [*EVALUATED, save, "--exit-interval=4"]
    committed, done = outcome(megatron_fork_server, tmp_path, flags)
    assert committed == 4
    assert done == [
        *(*iterations(1, 3), "evaluation 3 validation"),
        *(*iterations(4, 4), "checkpoint_saved 4"),
    ]


def test_a_job_goes_on_where_an_exit_interval_ended_it_and_repeats_only_its_end(
    megatron_fork_server, tmp_path, save
):
    flags = ["--train-iters=5", "--eval-iters=1", save, "--load" + save.removeprefix("--save")]
    end = ["evaluation 5 validation", "evaluation 5 test"]
    first, second, third = (
        outcome(megatron_fork_server, tmp_path, [*flags, "--exit-interval=3"]) for _ in range(3)
    )
    assert first == [3, [*iterations(1, 3), "checkpoint_saved 3"]]
    assert second == [5, [*iterations(4, 5), "checkpoint_saved 5", *end]]
    assert third == [5, end]


def test_when_its_time_is_over_the_job_ends_after_the_step(megatron_fork_server, tmp_path, save):
    committed, done = outcome(megatron_fork_server, tmp_path, [save], duration_s=0.0)
    assert committed == 1
    assert done == [*iterations(1, 1), "checkpoint_saved 1"]


def test_the_time_of_a_job_is_counted_from_the_start_of_its_program(
    megatron_fork_server, tmp_path, save
):
    flags = [*TINY, save, "--exit-duration-in-mins=1e-4", "--moevement-no-progress-bar"]
    with megatron_fork_server.start_program(PROGRAM, flags, world_size=1) as job:
        job.wait().check()
    assert saved_in(tmp_path) == ["iter_0000001"]


@pytest.mark.parametrize("signalled", [[1], pytest.param([0, 1], marks=pytest.mark.slow)])
def test_a_signal_to_any_rank_ends_all_after_one_step_and_saves(
    megatron_fork_server, tmp_path, save, signalled
):
    committed, done = outcome(
        megatron_fork_server, tmp_path, [*EVALUATED, save], signal_in=2, signalled=signalled
    )
    assert committed == 3  # the signal came while step 2 ran; step 3 carries it to all
    assert done == [*iterations(1, 3), "evaluation 3 validation", "checkpoint_saved 3"]
    assert saved_in(tmp_path) == ["iter_0000003"]


def watched_steps(flags):
    """Returns of each step, in order, whether the progress watchdog waits for its end."""
    from megatron_moevement.runtime.coordination.generation import Generation  # noqa: PLC0415
    from megatron_moevement.training.loop import train as run_loop  # noqa: PLC0415
    from megatron_moevement.training.resident import Resident  # noqa: PLC0415
    from megatron_moevement.training.stop_request import StopSources  # noqa: PLC0415

    waits, waited = [False], []

    def note(*, does_wait):
        waits[0] = does_wait

    generation = Generation(ping=lambda: note(does_wait=True), rest=lambda: note(does_wait=False))
    with tiny_job(*flags) as job:
        forward_backward = job.schedule.forward_backward

        def noted(*args):
            waited.append(waits[0])
            return forward_backward(*args)

        job.schedule.forward_backward = noted
        run_loop(job, StopSources(None), Resident(job.arguments, job.backend), generation)
    return [*waited, waits[0]]


def test_the_first_step_may_take_any_time(megatron_fork_server):
    """It compiles, loads libraries and waits for the ranks that do so."""
    flags = ["--train-iters=4", "--eval-iters=1", "--eval-interval=2"]
    (waited,) = megatron_fork_server.run(watched_steps, world_size=1, args=[flags]).check().values
    assert waited == [False, True, True, True, False]


def alive_when_built_anew(flags):
    """Trains a step, then a generation that finds no state; returns how often it was built anew,
    and what of the former model and optimizer was there then.
    """
    import weakref  # noqa: PLC0415

    from megatron_moevement.runtime.coordination.commit_barrier import StopRequest  # noqa: PLC0415
    from megatron_moevement.runtime.coordination.generation import Generation  # noqa: PLC0415
    from megatron_moevement.runtime.coordination.progress import START  # noqa: PLC0415
    from megatron_moevement.training import loop, resident  # noqa: PLC0415
    from megatron_moevement.training.steps import build_datasets, open_steps  # noqa: PLC0415
    from megatron_moevement.training.stop_request import StopSources  # noqa: PLC0415

    build, alive, former = resident.build_part, [], {}

    def note_and_build(*args, **kwargs):
        alive.append([name for name, one in former.items() if one() is not None])
        return build(*args, **kwargs)

    with tiny_job(*flags) as job:
        with open_steps(job, build_datasets(job), START) as step:
            step.run(StopRequest.NONE)
        del step
        (chunk,) = job.chunks
        parts = {
            "chunk": chunk,
            "weights": next(chunk.parameters()),
            "buffer": chunk.buffers[0],
            "optimizer": job.optimizer,
        }
        former.update({name: weakref.ref(part) for name, part in parts.items()})
        del chunk, parts
        own = resident.Resident(job.arguments, job.backend)
        resident.build_part = note_and_build
        try:
            loop.train(job, StopSources(None), own, Generation(1))
        finally:
            resident.build_part = build
        return [alive, job.ledger.newest]


@pytest.mark.parametrize("flags", [[], ["--bf16", "--use-distributed-optimizer"]])
def test_a_model_is_gone_before_it_is_built_anew(megatron_fork_server, flags):
    job = megatron_fork_server.run(
        alive_when_built_anew, world_size=1, args=[["--train-iters=2", *flags]]
    )
    assert job.check().values == ([[[]], 2],)


def collections(flags):
    """Trains a job; returns which generations were collected between its first and last step."""
    from megatron_moevement.runtime.coordination.generation import Generation  # noqa: PLC0415
    from megatron_moevement.training.loop import train as run_loop  # noqa: PLC0415
    from megatron_moevement.training.resident import Resident  # noqa: PLC0415
    from megatron_moevement.training.stop_request import StopSources  # noqa: PLC0415

    found = []

    def note(phase, info):
        if phase == "start":
            found.append(info["generation"])

    with tiny_job(*flags) as job:
        forward_backward = job.schedule.forward_backward
        steps = iter(range(1, job.arguments.run.train_iters + 1))

        def noted(*args):
            step = next(steps)
            if step == 1:
                gc.callbacks.append(note)
            elif step == job.arguments.run.train_iters:
                gc.callbacks.remove(note)
            return forward_backward(*args)

        job.schedule.forward_backward = noted
        run_loop(job, StopSources(None), Resident(job.arguments, job.backend), Generation())
    return [found, gc.isenabled()]


@pytest.mark.parametrize(("interval", "times"), [("3", 2), ("0", 0)])
def test_garbage_is_collected_after_the_steps_that_were_asked_for(
    megatron_fork_server, interval, times
):
    flags = ["--manual-gc", f"--manual-gc-interval={interval}"]
    ((found, is_enabled),) = (
        megatron_fork_server.run(collections, world_size=1, args=[flags]).check().values
    )
    assert found == [2] * times
    assert is_enabled


def logged_totals(flags):
    """Trains a job; returns its digests, the totals of each step, and its iteration lines."""
    import contextlib  # noqa: PLC0415
    import io  # noqa: PLC0415

    from megatron_moevement.runtime.coordination.generation import Generation  # noqa: PLC0415
    from megatron_moevement.training import loop  # noqa: PLC0415
    from megatron_moevement.training.resident import Resident  # noqa: PLC0415
    from megatron_moevement.training.stop_request import StopSources  # noqa: PLC0415

    step, totals, printed = loop.Reporter.step, {}, io.StringIO()

    def noted(self, entry, *args, **kwargs):
        totals[entry.step] = kwargs["totals"].scalars()
        step(self, entry, *args, **kwargs)

    loop.Reporter.step = noted
    try:
        with tiny_job(*flags) as job, contextlib.redirect_stdout(printed):
            loop.train(job, StopSources(None), Resident(job.arguments, job.backend), Generation())
            digests = job.digests()
    finally:
        loop.Reporter.step = step
    lines = [line for line in printed.getvalue().splitlines() if " iteration " in line]
    return [digests, totals, lines]


TOTALS = {
    "--log-num-zeros-in-grad": ("num-zeros", " num zeros: "),
    "--log-params-norm": ("params-norm", " params norm: "),
}


def test_what_is_summed_over_the_model_is_logged_and_changes_no_bit(megatron_fork_server):
    layout = ["--pipeline-model-parallel-size=2", "--expert-model-parallel-size=2", "--bf16"]
    flags = [*layout, "--use-distributed-optimizer", "--train-iters=4", "--log-interval=2"]
    flags += ["--moevement-no-progress-bar"]
    plain, logged = (
        megatron_fork_server.run(logged_totals, world_size=4, args=[[*flags, *more]]).check().values
        for more in ([], TOTALS)
    )
    assert [rank[0] for rank in logged] == [rank[0] for rank in plain]
    assert all(not any(rank[1].values()) for rank in plain)
    names = {name for name, _ in TOTALS.values()}
    assert all(rank[1] == logged[0][1] for rank in logged)
    assert {step: set(named) for step, named in logged[0][1].items()} == {
        "1": set(),
        "2": names,
        "3": set(),
        "4": names,
    }
    for _, words in TOTALS.values():
        assert [line.count(words) for line in logged[-1][2]] == [1, 1]
        assert [line.count(words) for line in plain[-1][2]] == [0, 0]
