# SPDX-License-Identifier: Apache-2.0
"""`moevement data`: makes data sets from text, and looks into them."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from megatron_moevement.cli.output import add_json_flag, show
from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.integrations.megatron.tiktoken import (
    DEFAULT_SPLITTING,
    PATTERNS,
    SPECIAL_TOKENS,
    Splitting,
)
from megatron_moevement.training.data.arguments import check_prefix, check_tokenizer
from megatron_moevement.training.data.documents import InputFormat, Search
from megatron_moevement.training.data.manifest import Manifest, read_manifest
from megatron_moevement.training.data.tokenizer_spec import TokenizerSpec
from megatron_moevement.training.data.tokenizers import DecodeErrors, Tokenizer, TokenizerType

HELP = "prepare and inspect training data"
DESCRIPTION = __doc__

_DEFAULT_PATTERNS = ("*.txt", "*.jsonl")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of both actions."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_prepare(actions)
    _add_inspect(actions)


def _add_prepare(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "prepare",
        help="make .bin, .idx and a manifest from text",
        description="Tokenizes text files (a document each), JSONL files (a document per line) and "
        "folders of them.",
    )
    parser.set_defaults(parser=parser)
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files, folders")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="without .bin")
    _add_tokenizer_flags(parser, TokenizerType.BYTE)
    add = parser.add_argument
    add(
        "--pattern",
        nargs="+",
        default=_DEFAULT_PATTERNS,
        metavar="GLOB",
        help=f"names of the files of a folder (default: {' '.join(_DEFAULT_PATTERNS)})",
    )
    add(
        "--exclude",
        nargs="+",
        default=(),
        metavar="GLOB",
        help="names of files and folders inside a folder to leave out",
    )
    add(
        "--input-format",
        choices=[member.value for member in InputFormat],
        default=InputFormat.AUTO.value,
        help="what a file holds (default: JSON lines in .jsonl and .ndjson, else text)",
    )
    add(
        "--json-keys",
        nargs="+",
        default=("text",),
        metavar="KEY",
        help="keys whose texts, joined by a newline, make the document (default: text)",
    )
    add("--append-eod", action="store_true", help="end each document with the end-of-document id")
    add(
        "--decode-errors",
        choices=[member.value for member in DecodeErrors],
        default=DecodeErrors.STRICT.value,
        help="what to do about bytes that are no UTF-8 (default: strict, stop there)",
    )
    add(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="processes that tokenize (default: the cores of this machine); output is the same",
    )
    add("--overwrite", action="store_true", help="replace a data set that is there")
    add_json_flag(parser)


def _add_inspect(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "inspect",
        help="show what a data set holds",
        description="Shows what a data set holds and checks its ids against a vocabulary.",
    )
    parser.set_defaults(parser=parser)
    parser.add_argument("prefix", metavar="PREFIX", help="path without .bin and .idx")
    _add_tokenizer_flags(parser, None)
    parser.add_argument("--tokens", type=int, default=64, help="first tokens to show")
    add_json_flag(parser)


def _add_tokenizer_flags(parser: argparse.ArgumentParser, default: TokenizerType | None) -> None:
    kind = default.value if default else "that of the manifest, where it needs no file"
    parser.add_argument(
        "--tokenizer-type",
        choices=[member.value for member in TokenizerType],
        default=default.value if default else None,
        help=f"(default: {kind})",
    )
    parser.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="tokenizer.json, a folder that holds one, a model of SentencePiece, or tokens (.json)",
    )
    parser.add_argument(
        "--tiktoken-pattern",
        choices=PATTERNS,
        default=DEFAULT_SPLITTING.pattern,
        help=f"how the TikTokenizer cuts text (default: {DEFAULT_SPLITTING.pattern})",
    )
    parser.add_argument(
        "--tiktoken-num-special-tokens",
        type=int,
        metavar="N",
        default=DEFAULT_SPLITTING.num_special,
        help=f"its ids before those of its file (default: {DEFAULT_SPLITTING.num_special})",
    )
    parser.add_argument(
        "--tiktoken-special-tokens",
        nargs="+",
        metavar="TOKEN",
        help=f"its special tokens (default: {' '.join(SPECIAL_TOKENS)})",
    )
    parser.add_argument("--vocab-file", metavar="FILE", help="vocab.json of the GPT2BPETokenizer")
    parser.add_argument("--merge-file", metavar="FILE", help="merges.txt of the GPT2BPETokenizer")
    ids = "number of ids of the NullTokenizer; of the TikTokenizer, special ones included"
    parser.add_argument("--vocab-size", type=int, help=ids)


def run(args: argparse.Namespace) -> int:
    """Runs one of the actions."""
    return {"prepare": _prepare, "inspect": _inspect}[args.action](args)


def _prepare(args: argparse.Namespace) -> int:
    if args.workers < 1:
        raise UserError(f"--workers {args.workers} must be a positive integer")
    prepare = _import_quietly("megatron_moevement.training.data.prepare")
    work = prepare.Preparation(
        inputs=tuple(Path(path) for path in args.input),
        prefix=args.output_prefix,
        tokenizer=_spec(args.tokenizer_type, args, DecodeErrors(args.decode_errors)),
        search=Search(tuple(args.pattern), tuple(args.exclude), InputFormat(args.input_format)),
        json_keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        workers=args.workers,
        existing=prepare.Existing.REPLACE if args.overwrite else prepare.Existing.REFUSE,
    )
    with _progress_bar(args.output_prefix) as on_progress:
        manifest = prepare.prepare(work, on_progress)
    document = {
        "prefix": args.output_prefix,
        "bytes_by_file": {
            str(path): path.stat().st_size for path in prepare.output_paths(args.output_prefix)
        },
        "manifest": dataclasses.asdict(manifest),
    }
    show(args, document, [f"{args.output_prefix}: {_summary(manifest)}"])
    return ExitCode.DONE


def _inspect(args: argparse.Namespace) -> int:
    check_prefix(args.prefix)
    manifest = read_manifest(args.prefix)
    tokenizer = _tokenizer_of(args, manifest)
    indexed = _import_quietly("megatron_moevement.integrations.megatron.indexed")
    facts = indexed.read_facts(args.prefix)
    chunks = list(indexed.token_chunks(args.prefix))
    first = chunks[0][: max(args.tokens, 0)].tolist()
    document = {
        "documents": facts.documents,
        "tokens": facts.tokens,
        "type": facts.dtype.name,
        "largest_id": max(int(chunk.max()) for chunk in chunks),
        "manifest": None if manifest is None else dataclasses.asdict(manifest),
        "first_tokens": first,
        "first_text": None,
        "vocab_size": None if tokenizer is None else tokenizer.vocab_size,
    }
    if tokenizer is not None and document["largest_id"] < tokenizer.vocab_size:
        document["first_text"] = tokenizer.detokenize(first)
    show(args, document, [_table(document)])
    if tokenizer is not None:
        _check_vocabulary(args.prefix, tokenizer, document["largest_id"])
    return ExitCode.DONE


def _table(found: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name in ("documents", "tokens", "type", "largest_id"):
        table.add_row(name.replace("_", " "), str(found[name]))
    manifest = found["manifest"]
    if manifest is not None:
        source = manifest["source"]
        table.add_row("made with", str(manifest["tokenizer"]["class"]))
        table.add_row("unigram entropy", f"{manifest['unigram_entropy_nats']:.4f} nats")
        table.add_row("source", f"{source['files']} files, {source['bytes']} bytes")
        table.add_row("source sha256", source["sha256"])
    table.add_row("first tokens", " ".join(map(str, found["first_tokens"])))
    if found["first_text"] is not None:
        # repr: text from a file must not drive the terminal
        table.add_row("first text", Text(repr(found["first_text"])))
        table.add_row("vocabulary", f"{found['vocab_size']} ids, holds every id of the data")
    return table


def _check_vocabulary(prefix: str, tokenizer: Tokenizer, largest: int) -> None:
    if largest >= tokenizer.vocab_size:
        raise UserError(
            f"data {prefix} holds the id {largest}, the vocabulary ends at "
            f"{tokenizer.vocab_size - 1}; name the tokenizer that made the data"
        )
    check_tokenizer(prefix, tokenizer)


def _tokenizer_of(args: argparse.Namespace, manifest: Manifest | None) -> Tokenizer | None:
    """Returns the tokenizer that the flags name, else the manifest's, if that needs no file."""
    kind = args.tokenizer_type
    if kind is None and args.tokenizer_model is not None:
        kind = TokenizerType.HUGGING_FACE.value
    if kind is not None:
        return _spec(kind, args).build()
    if manifest is not None and manifest.tokenizer["class"] == TokenizerType.BYTE.value:
        return TokenizerSpec(TokenizerType.BYTE).build()
    return None


def _spec(
    kind: str, args: argparse.Namespace, errors: DecodeErrors = DecodeErrors.STRICT
) -> TokenizerSpec:
    return TokenizerSpec(
        TokenizerType(kind),
        args.tokenizer_model,
        args.vocab_size,
        errors,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        splitting=Splitting(
            args.tiktoken_pattern,
            args.tiktoken_num_special_tokens,
            None if args.tiktoken_special_tokens is None else tuple(args.tiktoken_special_tokens),
        ),
    )


def _summary(manifest: Manifest) -> str:
    empty = f" ({manifest.empty_documents} empty ones left out)" * bool(manifest.empty_documents)
    return (
        f"{manifest.documents} documents{empty}, {manifest.tokens} tokens ({manifest.dtype}), "
        f"unigram entropy {manifest.unigram_entropy_nats:.4f} nats"
    )


@contextmanager
def _progress_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function that moves a progress bar, if there is a terminal to show it on."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(Path(name).name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _import_quietly(name: str) -> ModuleType:
    """Imports what brings in Megatron-Core: slow, and not without warnings about options."""
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    return importlib.import_module(name)
