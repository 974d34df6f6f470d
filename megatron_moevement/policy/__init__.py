# SPDX-License-Identifier: Apache-2.0
"""Decides: windows, replicas, logs and plans as pure functions of frozen data."""
