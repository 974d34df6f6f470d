# SPDX-License-Identifier: Apache-2.0
"""The bar shows on a terminal only and never garbles a line of the log."""

import io
import os
import pty
import re
import sys
import termios
import threading

import pytest

from megatron_moevement.training.reporting.progress_bar import (
    ProgressBar,
    ProgressDisplay,
    open_progress,
)

LINES = [" [time] iteration 1/ 3 | lm loss: 1.0 |", "-----\n validation loss\n-----"]


@pytest.fixture
def terminal(monkeypatch):
    """Yields a stream to a new pseudo-terminal and a function that returns what was shown."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    controller, device = pty.openpty()
    attributes = termios.tcgetattr(device)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(device, termios.TCSANOW, attributes)
    os.set_blocking(controller, False)
    with os.fdopen(device, "w", encoding="utf-8") as stream:
        shown = bytearray()

        def read() -> str:
            stream.flush()
            while True:
                try:
                    shown.extend(os.read(controller, 65536))
                except BlockingIOError:
                    return shown.decode()

        yield stream, read
    os.close(controller)


def screen(output: str) -> list[str]:
    """Returns the lines that a terminal shows after this output."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|.", output, re.DOTALL):
        if token == "\n":
            row, column = row + 1, 0
            if row == len(lines):
                lines.append("")
        elif token == "\r":
            column = 0
        elif token == "\x1b[2K":
            lines[row] = ""
        elif token.startswith("\x1b"):
            if token.endswith("A"):
                row -= int(token[2:-1] or 1)
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + token + line[column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


def test_the_bar_is_below_the_lines_and_leaves_with_the_end(terminal, monkeypatch):
    stream, read = terminal
    monkeypatch.setattr(sys, "stdout", stream)  # both go to one terminal
    bar = open_progress(3, 0, stream)
    assert isinstance(bar, ProgressBar)
    bar.advance_to(1, 1.0)
    assert any("1/3" in line for line in screen(read()))
    for text in LINES:
        bar.print_line(text)
    bar.advance_to(2, 0.5)
    *log, last = [line for line in screen(read()) if line]
    assert log == "\n".join(LINES).split("\n")
    assert "/3" in last
    bar.close()
    assert [line for line in screen(read()) if line] == log


def test_the_log_holds_the_lines_alone_when_it_goes_to_a_file(terminal, capsys):
    stream, read = terminal
    bar = open_progress(3, 0, stream)
    bar.advance_to(1, 1.0)
    bar.print_line(LINES[0])
    bar.close()
    assert capsys.readouterr().out == LINES[0] + "\n"
    assert "lm loss: 1.0" not in read()


def test_the_bar_is_drawn_a_few_times_a_second_at_most(terminal):
    stream, read = terminal
    now_s = [0.0]
    bar = ProgressBar(1000, 0, stream, clock_s=lambda: now_s[0])
    for k in range(1, 1001):
        now_s[0] += 0.001
        bar.advance_to(k, 1.0)
    drawn = read().count("iteration")
    bar.close()
    assert 10 <= drawn <= 12


def test_the_bar_owns_no_thread(terminal):
    before = threading.active_count()
    bar = open_progress(3, 0, terminal[0])
    assert threading.active_count() == before
    bar.close()


def test_nothing_is_shown_without_a_terminal(capsys):
    display = open_progress(3, 0, io.StringIO())
    assert type(display) is ProgressDisplay
    display.advance_to(1, 1.0)
    display.print_line("a line")
    display.close()
    assert capsys.readouterr() == ("a line\n", "")


def test_nothing_is_shown_on_a_terminal_that_can_not_move_its_cursor(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert type(open_progress(3, 0, terminal[0])) is ProgressDisplay
