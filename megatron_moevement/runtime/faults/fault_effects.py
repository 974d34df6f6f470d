# SPDX-License-Identifier: Apache-2.0
"""What a fault on purpose does to its own process."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading

from megatron_moevement.errors import ExitCode, MoEvementError
from megatron_moevement.policy.faults.fault_schedule import FaultKind
from megatron_moevement.runtime.interrupts.thread_start import raise_in_thread


class InjectedFaultError(MoEvementError, RuntimeError):
    """Raised on purpose."""


class InjectedExit(SystemExit):
    """What `sys.exit(1)` raises, made by the interpreter in another thread."""

    def __init__(self) -> None:
        super().__init__(int(ExitCode.FAILURE))


def inflict(kind: FaultKind) -> None:
    """Does it to this process, on the calling thread; returns only from a stop that was continued.

    `sys.exit` ends a process from its main thread alone. From another thread it is ended at once.

    Raises:
        InjectedFaultError: that is the fault.
        SystemExit: that is the fault.
    """
    match kind:
        case FaultKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case FaultKind.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case FaultKind.SEGFAULT:
            _, hard = resource.getrlimit(resource.RLIMIT_CORE)
            resource.setrlimit(resource.RLIMIT_CORE, (0, hard))  # nobody wants to look into it
            ctypes.string_at(0)
        case FaultKind.EXCEPTION:
            raise InjectedFaultError("an exception on purpose")
        case FaultKind.EXIT:
            if threading.current_thread() is threading.main_thread():
                sys.exit(ExitCode.FAILURE)
            os._exit(ExitCode.FAILURE)


def inflict_on(kind: FaultKind, thread: int) -> None:
    """Does it to this process from another thread, at whatever instruction the victim has come to.

    An exception arrives at the next bytecode of the victim, so not before a call into a library
    that it waits in has returned.

    Args:
        thread: identifier of the thread that exceptions and `sys.exit` are for.
    """
    raised: dict[FaultKind, type[BaseException]] = {
        FaultKind.EXCEPTION: InjectedFaultError,
        FaultKind.EXIT: InjectedExit,
    }
    if kind in raised:
        raise_in_thread(thread, raised[kind])
    else:
        inflict(kind)
