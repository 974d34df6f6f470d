# SPDX-License-Identifier: Apache-2.0
"""The CPU backend, installed before a test module of this folder imports Megatron-Core."""

from megatron_moevement.backends import cpu

cpu.install()
