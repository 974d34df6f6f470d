"""The flag by which commands find what runs keep in host memory."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_moevement.runtime.stores.store import default_store_dir


def add_store_dir(parser: argparse.ArgumentParser) -> None:
    """Adds `--store-dir`."""
    parser.add_argument(
        "--store-dir",
        type=Path,
        default=default_store_dir(),
        metavar="DIR",
        help="the --moevement-store-dir of the run (default: %(default)s)",
    )
