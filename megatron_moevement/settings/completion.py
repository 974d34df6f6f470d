# SPDX-License-Identifier: Apache-2.0
"""`--print-completion`: what makes a shell complete the flags of a program."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

SHELLS = ("bash", "zsh", "tcsh")
_BEHIND_A_LAUNCHER = """
# Behind a launcher the flags begin after the name of the program, or behind our own after --.
_moevement_behind_a_launcher() {{
  local at word
  for ((at = COMP_CWORD - 1; at > 0; at--)); do
    word="${{COMP_WORDS[at]##*/}}"
    [ "$word" != -- ] || [ "${{COMP_WORDS[0]##*/}}" != run_local.sh ] || word={program}
    case "$word" in
    {program})
      COMP_WORDS=({program} "${{COMP_WORDS[@]:at+1}}")
      COMP_CWORD=$((COMP_CWORD - at))
      {function} {program} "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD-1]}}"
      return
      ;;
    esac
  done
  COMPREPLY=()
}}
complete -o bashdefault -o default -F _moevement_behind_a_launcher {launchers}
"""
"""For bash: readers type the name of a launcher, which completion goes by."""


class _PrintCompletion(argparse.Action):
    """Prints what makes a shell complete the command and its flags, and ends."""

    launchers = ""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: Any, option: object = None
    ) -> NoReturn:
        del namespace, option
        import shtab  # noqa: PLC0415  (for this alone)

        _name_choices(parser)
        text = shtab.complete(parser, values) + "\n"
        if self.launchers and values == "bash":
            words = {"program": parser.prog, "launchers": self.launchers}
            # What shtab calls it.
            function = text.rpartition(" -F ")[2].split()[0]
            text += _BEHIND_A_LAUNCHER.format(function=function, **words)
        sys.stdout.write(text)
        parser.exit()


def _name_choices(parser: argparse.ArgumentParser) -> None:
    """Names the values of flags that become members of an enum: only their help has them."""
    for action in parser._actions:  # noqa: SLF001
        shown = action.metavar
        if isinstance(shown, str) and shown.startswith("{") and action.choices is None:
            action.choices = shown.strip("{}").split(",")


class _PrintCompletionOfProgram(_PrintCompletion):
    """The same for a program that launchers start."""

    launchers = "python python3 torchrun run_local.sh"


def add_completion(parser: argparse.ArgumentParser, *, is_launched: bool = False) -> None:
    """Adds `--print-completion`.

    Args:
        is_launched: whether launchers start the program: in bash its flags are completed behind
            their own, too.
    """
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletionOfProgram if is_launched else _PrintCompletion,
        choices=SHELLS,
        help="print the completion of a shell, and exit",
    )
