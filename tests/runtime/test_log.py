# SPDX-License-Identifier: Apache-2.0
"""The log: who says what, when and where, on each line; nothing of it is set up by a library."""

import contextlib
import ctypes
import io
import logging
import socket
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta

from megatron_moevement.runtime.observation.log import PACKAGE, lines_for_output, open_log
from tests.harness.log_lines import log_lines, without_prefixes

logger = logging.getLogger(f"{PACKAGE}.somewhere.below")


def test_each_line_has_time_host_place_level_and_program(capsys):
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    with open_log("pretrain_moe.py", "rank 3") as log:
        logger.warning("%d of %d are lost", 1, 4)
        log.place = "spare 7"
        logger.info("first\nsecond")
    told = capsys.readouterr().err
    first, *others = log_lines(told)
    assert before <= datetime.fromisoformat(first.time) <= datetime.now(UTC)
    assert (first.host, first.place, first.level) == (socket.gethostname(), "rank 3", "WARNING")
    assert (first.program, first.text) == ("pretrain_moe.py", "1 of 4 are lost")
    assert [(one.place, one.level, one.text) for one in others] == [
        ("spare 7", "INFO", "first"),
        ("spare 7", "INFO", "second"),
    ]
    assert without_prefixes(told) == "1 of 4 are lost\nfirst\nsecond\n"


def test_a_traceback_is_of_the_same_process_line_by_line(capsys):
    with open_log("pretrain_moe.py", "rank 0"):
        try:
            raise ValueError("why")
        except ValueError:
            logger.exception("it failed")
    told = capsys.readouterr().err
    assert len(list(log_lines(told))) == len(told.splitlines()) > 3
    assert without_prefixes(told).startswith(
        "it failed\nTraceback (most recent call last):\n  File"
    )


def test_what_is_below_the_level_is_not_told(capsys):
    with open_log("pretrain_moe.py", "rank 0") as log:
        logger.debug("no")
        log.show(logging.ERROR)
        logger.warning("no")
        logger.error("yes")
        log.show(logging.DEBUG)
        logger.debug("yes")
    assert [line.text for line in log_lines(capsys.readouterr().err)] == ["yes", "yes"]


def test_behind_it_everything_is_as_it_was(capsys, caplog):
    package = logging.getLogger(PACKAGE)
    before = (package.level, package.propagate, list(package.handlers))
    root = list(logging.getLogger().handlers)
    with contextlib.suppress(ZeroDivisionError), open_log("pretrain_moe.py", "rank 0"):
        logger.warning("ours")
        assert logging.getLogger().handlers == root
        raise ZeroDivisionError
    assert (package.level, package.propagate, package.handlers) == before
    logger.warning("theirs")
    assert caplog.messages == ["theirs"]
    assert [line.text for line in log_lines(capsys.readouterr().err)] == ["ours"]


class RestartError(Exception):
    """What a restart raises in a thread, wherever it is."""


def interrupt(thread):
    set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
    set_exception(ctypes.c_ulong(thread.ident), ctypes.py_object(RestartError))


def test_threads_that_are_interrupted_in_a_line_keep_nobody_from_telling_more(monkeypatch):
    told = io.StringIO()
    monkeypatch.setattr(sys, "stderr", told)

    def tell(begun):
        with contextlib.suppress(RestartError):
            begun.set()
            while True:
                logger.warning("again")

    with open_log("pretrain_moe.py", "rank 0"):
        for _ in range(500):
            begun = threading.Event()
            teller = threading.Thread(target=tell, args=(begun,), daemon=True)
            teller.start()
            begun.wait()
            while teller.is_alive():
                interrupt(teller)
                teller.join(timeout=0.01)
        other = threading.Thread(target=lambda: logger.warning("still here"), daemon=True)
        other.start()
        other.join(timeout=10)
    assert told.getvalue().endswith("still here\n")


def test_a_text_for_standard_output_is_whole_in_lines_of_the_log():
    text = "----\n validation loss\n----"
    with open_log("pretrain_moe.py", "rank ?") as log:
        log.place = "rank 3"
        lines = lines_for_output(text)
    assert [line.text for line in log_lines(lines)] == text.splitlines()
    assert {(line.place, line.level) for line in log_lines(lines)} == {("rank 3", "INFO")}
    assert lines.endswith("\n")
    assert lines_for_output(text) == f"{text}\n", "no program has opened a log"


def test_a_stream_that_is_gone_ends_nobody(monkeypatch):
    class Gone:
        def write(self, text):
            raise BrokenPipeError

    with open_log("pretrain_moe.py", "rank 0"):
        monkeypatch.setattr(sys, "stderr", Gone())
        logger.warning("to nobody")


def test_the_package_leaves_the_logging_of_a_program_that_uses_it_alone():
    code = (
        "import logging; from megatron_moevement.cli import build_parser; build_parser();"
        "own = [logging.getLogger(), *map(logging.getLogger, "
        "[name for name in logging.root.manager.loggerDict if name.startswith('megatron_moev')])];"
        "print([(one.name, one.handlers, one.level) for one in own if one.handlers "
        "or one.level not in (0, 30) or not one.propagate])"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout == "[]\n"
