# SPDX-License-Identifier: Apache-2.0
"""Watching: time limits of sections, and ranks that are slow."""
