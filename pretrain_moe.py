# SPDX-License-Identifier: Apache-2.0
"""Trains a GPT Mixture-of-Experts model: Megatron-LM's flags, and `--moevement-*`."""

import sys

from megatron_moevement.errors import UserError

if __name__ == "__main__":
    try:  # flags are made of Megatron-Core's fields
        from megatron_moevement.training.program import main
    except UserError as error:
        print(f"pretrain_moe.py: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
    sys.exit(main(sys.argv[1:]))
