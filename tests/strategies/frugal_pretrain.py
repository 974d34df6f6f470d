# SPDX-License-Identifier: Apache-2.0
"""The training program with an allocator that gives back at once what is freed."""

import ctypes
import sys

from megatron_moevement.training.program import main

_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # names of `malloc.h`
_LARGE_BYTES = 64 << 10

if __name__ == "__main__":
    libc = ctypes.CDLL(None)
    assert libc.mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
    assert libc.mallopt(_ARENA_MAX, 1)
    sys.exit(main(sys.argv[1:]))
