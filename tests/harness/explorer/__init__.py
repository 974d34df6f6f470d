# SPDX-License-Identifier: Apache-2.0
"""The explorer: draws whole jobs and what happens to them, runs them, and judges them."""
