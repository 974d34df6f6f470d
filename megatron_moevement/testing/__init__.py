# SPDX-License-Identifier: Apache-2.0
"""A seeded world that simulates a job, and the command that checks its invariants."""
