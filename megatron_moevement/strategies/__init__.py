# SPDX-License-Identifier: Apache-2.0
"""Strategies: how a job is protected against the loss of processes."""
