# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's tokenizer of tiktoken; the import of Megatron-Core waits until text is read.

Flags are read before torch and Megatron-Core are imported, and a job that trains reads no text.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATTERNS = ("v1", "v2")
DEFAULT_VOCABULARY = 2**17
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
"""What each has, as in Megatron-Core; a test compares them."""


@dataclasses.dataclass(frozen=True)
class Splitting:
    """What decides ids beside the file.

    Attributes:
        pattern: how text is cut before pairs are merged.
        num_special: ids before those of the file.
        special: the first of their names; None: `SPECIAL_TOKENS`.
    """

    pattern: str = "v2"
    num_special: int = 1000
    special: tuple[str, ...] | None = None

    @property
    def named(self) -> tuple[str, ...]:
        """The special tokens that have a name."""
        return SPECIAL_TOKENS if self.special is None else self.special


DEFAULT_SPLITTING = Splitting()


class TiktokenText:
    """Text to ids and back, by Megatron-Core."""

    def __init__(self, model: Path, splitting: Splitting, vocab_size: int) -> None:
        """Reads the file; it imports torch.

        Args:
            model: checked before.
            vocab_size: special tokens included.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what else is not installed
            from megatron.core.tokenizers.text.libraries.tiktoken_tokenizer import (  # noqa: PLC0415
                TikTokenTokenizer,
            )
        self._theirs: Any = TikTokenTokenizer(
            str(model),
            special_tokens=list(splitting.named),
            num_special_tokens=splitting.num_special,
            pattern=splitting.pattern,
            vocab_size=vocab_size,
        )

    def ids(self, text: str) -> Sequence[int]:
        """Returns the ids of a text; a special token in it has its own."""
        return list(self._theirs.text_to_ids(text))

    def text(self, ids: Sequence[int]) -> str:
        """Returns the text of ids; bytes that are no UTF-8 appear as U+FFFD.

        Megatron-Core decodes each id alone, which loses letters of several ids.
        """
        return str(self._theirs.tokenizer.decode(list(ids)))
