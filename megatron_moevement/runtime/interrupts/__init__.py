# SPDX-License-Identifier: Apache-2.0
"""Interrupts: waits that a restart can end, and what is left of a former generation."""
