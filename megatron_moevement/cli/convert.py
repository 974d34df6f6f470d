# SPDX-License-Identifier: Apache-2.0
"""`moevement convert`: makes a checkpoint of what a killed job left in host memory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_moevement.cli.inputs import check_flags
from megatron_moevement.cli.launch import GRACE, PROGRAM, Job, launch
from megatron_moevement.cli.output import add_json_flag, document_alone, show
from megatron_moevement.errors import ExitCode
from megatron_moevement.training.checkpoints import CheckpointFolder

HELP = "make a checkpoint of what a killed job left in host memory"
DESCRIPTION = """
Turns the newest persisted window that the killed ranks of a job left in this machine's memory into
a durable checkpoint, which loads into any parallel sizes and needs no strategy. A window becomes a
dense state by replay, so the training program is started with the flags of the job: it recovers,
replays up to the newest committed step, saves that to --save, and ends. The memory stays as it is.
Where the ranks of a job run on several machines, start them as for training, with
--moevement-recover-only.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `moevement convert`."""
    parser.usage = "moevement convert -n N [--json] -- FLAGS..."
    parser.add_argument("-n", "--ranks", type=int, required=True, help="ranks of the job")
    add_json_flag(parser, "the checkpoint as JSON, and all else on standard error")
    parser.add_argument(
        "flags",
        nargs="*",
        metavar="FLAGS",
        help="those of the job; --save names the folder of the checkpoint",
    )


def run(args: argparse.Namespace) -> int:
    """Starts the ranks, shows what they saved, and returns their exit code."""
    if args.ranks < 1:
        args.parser.error("-n must be at least 1")
    save = check_flags(args.flags, args.ranks).checkpointing.save
    flags = (*args.flags, "--moevement-recover-only")
    name = "moevement convert"
    job = Job(args.ranks, 0, PROGRAM, flags, GRACE, log_directory=None, name=name)
    with document_alone(args):
        code = launch(job).code
    if code == ExitCode.DONE:
        assert save is not None  # the ranks refuse to begin without it
        show(args, document(CheckpointFolder(Path(save))), [])  # rank 0 has printed it to people
    return code


def document(folder: CheckpointFolder) -> dict[str, Any]:
    """Returns what a conversion has saved: where, of which step, how many files and bytes."""
    step = folder.candidates()[0]
    files = folder.manifest(step) or {}
    return {
        "checkpoint": str(folder.path(step)),
        "step": step,
        "files": len(files),
        "bytes": sum(file.size_bytes for file in files.values()),
    }
