# SPDX-License-Identifier: Apache-2.0
"""The parser of both programs: help tells each default, a mistyped flag gets a proposal."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

from megatron_moevement import __version__
from megatron_moevement.errors import UserError
from megatron_moevement.settings.flags import as_given

_SHOWN_PACKAGES = ("megatron-core", "torch")
"""Whose versions decide what a job does."""


class HelpFormatter(argparse.HelpFormatter):
    """Appends its default to the help of each flag with a value."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = meaning_and_default(action)
        if default is None:
            return action.help
        shown = default.replace("%", "%%")
        note = "(required)" if action.required else f"(default: {shown})"
        return f"{text} {note}".lstrip()


def meaning_and_default(action: argparse.Action) -> tuple[str, str | None]:
    """Returns what a flag is for, and its default in words; None where it takes no value.

    A default that follows from something else is at the end of the help itself.
    """
    text = action.help or ""
    if not action.option_strings or action.nargs == 0:
        return text, None
    described = re.search(r" ?\(default: (.*)\)$", text)
    if described is not None:
        return text[: described.start()], described[1]
    return text, as_given(action.default)


def _shown(word: str) -> str:
    """Returns a word with quotes where it would look like others: spaces, and a carriage return."""
    return word if word.isprintable() and " " not in word and word else repr(word)


class _Version(argparse.Action):
    """Prints the version of this package, and those of what it stands on, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        below = ", ".join(f"{name} {_installed(name)}" for name in _SHOWN_PACKAGES)
        sys.stdout.write(f"{parser.prog} {__version__} ({below})\n")
        parser.exit()


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def add_version(parser: argparse.ArgumentParser) -> None:
    """Adds `--version`."""
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")


class Parser(argparse.ArgumentParser):
    """A parser with no abbreviations, whose help tells defaults."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(
            *args, **{"formatter_class": HelpFormatter, "allow_abbrev": False, **options}
        )

    def refuse_unknown(self, unknown: Sequence[str]) -> NoReturn:
        """Ends with what is not known, and what may have been meant."""
        words = " ".join(map(_shown, unknown))
        self.error(f"unrecognized arguments: {words}{self.proposal(unknown)}")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses; what is not known is an error of the sub-command that was given it."""
        values, unknown = self.parse_known_args(args, namespace)
        if unknown:
            getattr(values, "parser", self).refuse_unknown(unknown)
        return values

    @property
    def flags(self) -> frozenset[str]:
        """All that it knows."""
        return frozenset(option for action in self._actions for option in action.option_strings)

    def proposal(self, unknown: Iterable[str]) -> str:
        """Returns which flags may have been meant, as the end of a message."""
        known = sorted(self.flags)
        found = []
        for flag in (text.partition("=")[0] for text in unknown if text.startswith("--")):
            found += difflib.get_close_matches(flag.replace("_", "-"), known, n=1, cutoff=0.75)
        return f"; did you mean {', '.join(dict.fromkeys(found))}?" if found else ""


class UserParser(Parser):
    """One that leaves it to the program to say what is wrong, in lines."""

    def read(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
        """Returns the values of a command line, what nobody knows of it, and what is wrong.

        What a wrong flag was given is left out, so that all of them are found.
        """
        wrong: list[str] = []
        self.exit_on_error = False
        try:
            while True:
                try:
                    return *self.parse_known_args(words), wrong
                except argparse.ArgumentError as error:
                    wrong.append(self._worded(str(error)))
                    words = self._without(words, error.argument_name)
        finally:
            self.exit_on_error = True

    def _without(self, words: Sequence[str], name: str | None) -> list[str]:
        """Returns a command line without a flag, which argparse names with all of its spellings."""
        flags = frozenset((name or "").split("/"))
        kept: list[str] = []
        is_left_out = False
        for word in words:
            if word.startswith("--"):
                is_left_out = word.partition("=")[0] in flags
            if not is_left_out:
                kept.append(word)
        if len(kept) == len(words):
            raise UserError(self._worded(f"argument {name} is wrong"))
        return kept

    def _worded(self, message: str) -> str:
        return f"{message} (see {self.prog} --help)"

    def error(self, message: str) -> NoReturn:
        """Raises what is wrong.

        Raises:
            UserError: always.
        """
        raise UserError(self._worded(message))
