# SPDX-License-Identifier: Apache-2.0
"""Facts: what processes publish before a recovery, and what is read out of it."""
