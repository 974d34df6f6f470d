# SPDX-License-Identifier: Apache-2.0
"""A small model of SentencePiece."""

from __future__ import annotations

import io

from sentencepiece import SentencePieceTrainer

_SENTENCES = ("the cat sat on the mat", "a dog ran to the cat", "the dog sat")


def train_sentence_piece(eos_id: int = 2) -> bytes:
    """Returns a model that falls back to bytes, as Llama's does.

    Args:
        eos_id: the id of the end of a sentence; -1: there is none.
    """
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(_SENTENCES * 10),
        model_writer=model,
        model_type="bpe",
        vocab_size=300,
        byte_fallback=True,
        minloglevel=2,
        eos_id=eos_id,
    )
    return model.getvalue()
