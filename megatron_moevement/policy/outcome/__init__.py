# SPDX-License-Identifier: Apache-2.0
"""The outcome of a recovery: what it proved, what follows from it, and its account."""
