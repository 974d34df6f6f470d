# SPDX-License-Identifier: Apache-2.0
"""Protection: what processes keep for others, and where."""
