# SPDX-License-Identifier: Apache-2.0
"""Copies of persisted windows on slower, lasting storage, and back."""
