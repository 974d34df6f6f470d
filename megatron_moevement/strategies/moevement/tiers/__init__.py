# SPDX-License-Identifier: Apache-2.0
"""How a job writes persisted windows to slower storage, and goes on from there."""
