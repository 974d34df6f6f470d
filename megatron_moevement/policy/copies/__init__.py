# SPDX-License-Identifier: Apache-2.0
"""Copies: who keeps which slots, when a window is persisted, and what may be removed."""
