# SPDX-License-Identifier: Apache-2.0
"""Faults on purpose: where a process passes them, and what they do to it."""
