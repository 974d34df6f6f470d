# SPDX-License-Identifier: Apache-2.0
"""What commands print: tables and lines for people, or one JSON document for programs."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron_moevement.errors import ExitCode

if TYPE_CHECKING:
    from rich.console import RenderableType

_OUTPUT, _ERROR = 1, 2
"""The descriptors of standard output and standard error, which started processes inherit."""


def add_json_flag(parser: argparse.ArgumentParser, text: str = "as JSON, for programs") -> None:
    """Adds `--json`."""
    parser.add_argument("--json", action="store_true", help=text)


@contextlib.contextmanager
def document_alone(args: argparse.Namespace) -> Iterator[None]:
    """Where JSON is asked for, keeps all but the document from standard output.

    What this process prints meanwhile goes to standard error, and so does what processes print that
    it starts meanwhile. Call it from the main thread.
    """
    if not args.json:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(_OUTPUT)
    os.dup2(_ERROR, _OUTPUT)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, _OUTPUT)
        os.close(kept)


def show(
    args: argparse.Namespace,
    document: Any,
    shown: Sequence[RenderableType],
    *,
    in_a_line: bool = False,
) -> None:
    """Prints the document where JSON is asked for, else what is shown to people.

    Ends the process with 1, without a word, where its reader has left, as behind `| head`.

    Args:
        in_a_line: whether the document takes one line, for those who read it from a command that
            goes on.
    """
    if args.json:
        try:
            print(json.dumps(document, indent=None if in_a_line else 1), flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), _OUTPUT)  # for what Python flushes at its end
            raise SystemExit(ExitCode.FAILURE) from None
        return
    from rich.console import Console  # noqa: PLC0415  (launchers import nothing heavy)

    console = Console(highlight=False, emoji=False)  # ":x:" in a path stays what it is
    for each in shown:
        console.print(each, soft_wrap=isinstance(each, str), markup=False)
