# SPDX-License-Identifier: Apache-2.0
"""MoEvement: sparse checkpointing, upstream logging and localized recovery."""
