# SPDX-License-Identifier: Apache-2.0
"""The training program: arguments, data, presets, loop, checkpoints, reporting."""
