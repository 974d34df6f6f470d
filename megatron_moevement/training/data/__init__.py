# SPDX-License-Identifier: Apache-2.0
"""Training data: flags, tokenizers, preparation of text, and the micro-batches of every step."""
