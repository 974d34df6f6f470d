# SPDX-License-Identifier: Apache-2.0
"""The training program over a process group that behaves as NCCL's does.

NCCL_LIKE_MISHAP names what else happens: `slow-build` makes a process that is built in a restart
take `SLOW_S`, `slow-save` makes rank 1 take as long in its first save, `late-abort` interrupts rank
2 the first time when the step that it is in has ended, `failed-batch` lets a message of rank 1 fail
in its batch in step `FAILED_STEP`, as the first one after an abort does, `failed-end` lets the end
of the batch fail as well, which torch does not count. `lost-member` kills rank 1 in the first
restart when all others wait for it to connect. `without-MEND` takes a mend out.
"""

import functools
import os
import signal
import sys
import threading
import time

from tests.harness.nccl_like.install import install

SLOW_S = 12.0
FAILED_STEP = 5
LONG_ENOUGH_S = 0.5
"""After which all are in native code that called it right away."""
LATE_S = 60.0
"""At most; a step without collectives takes less on any machine."""


def work_for_long():
    until_s = time.monotonic() + SLOW_S
    while time.monotonic() < until_s:
        time.sleep(0.01)  # and give signs of life


def slow_build():
    from megatron_moevement.training import resident  # noqa: PLC0415  (upstream follows)

    build = resident.build_part

    @functools.wraps(build)
    def slowly(*args, known=None, **kwargs):
        if known is not None:
            work_for_long()
        return build(*args, known=known, **kwargs)

    resident.build_part = slowly


def slow_save():
    from torch.distributed.checkpoint.filesystem import FileSystemWriter  # noqa: PLC0415

    write = FileSystemWriter.write_data

    @functools.wraps(write)
    def slowly(self, *args, **kwargs):
        FileSystemWriter.write_data = write
        work_for_long()
        return write(self, *args, **kwargs)

    if os.environ["RANK"] == "1":
        FileSystemWriter.write_data = slowly


def late_abort():
    from megatron_moevement.integrations.nvrx.control_store import (  # noqa: PLC0415
        GenerationStore,
    )
    from megatron_moevement.training.step import TrainStep  # noqa: PLC0415

    if os.environ["RANK"] != "2":
        return
    wait, run = GenerationStore.wait_for_interrupted, TrainStep.run
    is_asked, has_ended = threading.Event(), threading.Event()

    @functools.wraps(wait)
    def wait_for_interrupted(self, timeout):
        wait(self, timeout)
        is_asked.set()
        has_ended.wait(LATE_S)

    @functools.wraps(run)
    def run_to_its_end(self, *arguments, **named):
        try:
            outcome = run(self, *arguments, **named)
        except Exception:
            has_ended.set()
            raise
        if is_asked.is_set() and not has_ended.is_set():
            has_ended.set()
            while True:  # until the interrupt
                time.sleep(0.01)
        return outcome

    GenerationStore.wait_for_interrupted = wait_for_interrupted
    TrainStep.run = run_to_its_end


def failed_batch(*, at_the_end=False):
    from megatron_moevement.training.step import TrainStep  # noqa: PLC0415
    from tests.harness.nccl_like import calls  # noqa: PLC0415
    from tests.harness.nccl_like.communicator import AbortedError  # noqa: PLC0415
    from tests.harness.nccl_like.group import NcclLikeGroup  # noqa: PLC0415

    if os.environ["RANK"] != "1":
        return
    send, run = NcclLikeGroup.send, TrainStep.run
    is_due = threading.Event()

    @functools.wraps(run)
    def run_and_fail(self, *arguments, **named):
        if self.progress.committed + 1 == FAILED_STEP:
            TrainStep.run = run
            is_due.set()
        return run(self, *arguments, **named)

    def send_or_fail(self, tensors, peer, tag):
        if is_due.is_set() and self._batch is not None:
            is_due.clear()
            if at_the_end:
                calls.defer(fail)
            fail()
        return send(self, tensors, peer, tag)

    def fail():
        raise AbortedError("of this test")

    TrainStep.run = run_and_fail
    NcclLikeGroup.send = send_or_fail


def lost_member():
    from torch.distributed import distributed_c10d  # noqa: PLC0415

    from megatron_moevement.training import job  # noqa: PLC0415

    connect, others = job.connect_groups, 3  # of four ranks
    begun = []

    @functools.wraps(connect)
    def connect_or_die(groups, device, **options):
        begun.append(device)
        waiting = distributed_c10d._get_default_store()  # of this generation
        if os.environ["RANK"] != "1":
            waiting.add("waiting", 1)
        elif len(begun) > 1:
            while waiting.add("waiting", 0) < others:
                time.sleep(0.01)
            time.sleep(LONG_ENOUGH_S)
            os.kill(os.getpid(), signal.SIGKILL)
        connect(groups, device, **options)

    job.connect_groups = connect_or_die


def refuse_late_connections():
    """Lets no ranks connect after the groups of a generation are connected."""
    from megatron_moevement.training import job  # noqa: PLC0415
    from tests.harness.nccl_like.group import NcclLikeGroup  # noqa: PLC0415

    connect = job.connect_groups

    @functools.wraps(connect)
    def connect_all(groups, device, **options):
        NcclLikeGroup.may_connect = True
        connect(groups, device, **options)
        NcclLikeGroup.may_connect = False

    job.connect_groups = connect_all


MISHAPS = {
    "slow-build": slow_build,
    "slow-save": slow_save,
    "late-abort": late_abort,
    "failed-batch": failed_batch,
    "failed-end": functools.partial(failed_batch, at_the_end=True),
    "lost-member": lost_member,
}

if __name__ == "__main__":
    install()
    os.environ["MOEVEMENT_FAILURE_DOMAIN"] = f"domain{os.environ['RANK']}"
    from tests.harness.nccl_like.mends import WITHOUT

    names = [*filter(None, os.environ.get("NCCL_LIKE_MISHAP", "").split(","))]
    if not WITHOUT.keys() & names:
        refuse_late_connections()
    for name in names:
        {**MISHAPS, **WITHOUT}[name]()
    from megatron_moevement.training.program import main
    from tests.harness import punctual_changes

    punctual_changes.install()
    sys.exit(main(sys.argv[1:]))
