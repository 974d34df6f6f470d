# SPDX-License-Identifier: Apache-2.0
"""What the programs of this package say to their user when they stop, and with which exit code."""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """Exit codes of `pretrain_moe.py` and of `moevement`."""

    DONE = 0
    FAILURE = 1
    BAD_ARGUMENTS = 2
    STATE_FLUSHED = 75
    INTERRUPTED = 130
    """By Ctrl-C; what a shell reports of a program that SIGINT ends."""


class MoEvementError(Exception):
    """The base of all exceptions of this package.

    One that also stands for a failure of torch or of Python derives from the built-in class, too.
    """


class UserError(MoEvementError):
    """Something the user can mend.

    Programs print each message as one line on standard error, without a traceback, and exit with
    `exit_code`. A message says what is wrong, where, and what to do about it.

    Attributes:
        messages: several, if several things are to be mended that do not depend on each other.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.BAD_ARGUMENTS

    def __init__(self, *messages: str) -> None:
        self.messages = tuple(" ".join(message.split()) for message in messages)
        super().__init__("\n".join(self.messages))
