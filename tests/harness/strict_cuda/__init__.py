# SPDX-License-Identifier: Apache-2.0
"""A CUDA runtime without a GPU that raises where the real one fails, leaks or wastes memory."""
