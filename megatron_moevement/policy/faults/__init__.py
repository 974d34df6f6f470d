# SPDX-License-Identifier: Apache-2.0
"""Faults: schedules of faults on purpose, and traces of failures."""
