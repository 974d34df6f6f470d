# SPDX-License-Identifier: Apache-2.0
"""Capture: the slot of every committed step."""
