"""Trains a GPT Mixture-of-Experts model: Megatron-LM's flags, and `--moevement-*`."""

import sys

from megatron_moevement.training.program import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
