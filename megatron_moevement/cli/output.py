# SPDX-License-Identifier: Apache-2.0
"""What listing commands print: tables and lines for people, or one JSON document for programs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console, RenderableType


def add_json_flag(parser: argparse.ArgumentParser, text: str = "as JSON, for programs") -> None:
    """Adds `--json`."""
    parser.add_argument("--json", action="store_true", help=text)


def show(args: argparse.Namespace, document: Any, shown: Sequence[RenderableType]) -> None:
    """Prints the document where JSON is asked for, else what is shown to people."""
    if args.json:
        print(json.dumps(document, indent=1))
        return
    console = Console(highlight=False)
    for each in shown:
        console.print(each, soft_wrap=isinstance(each, str), markup=False)
