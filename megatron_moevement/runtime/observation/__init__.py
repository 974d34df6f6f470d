# SPDX-License-Identifier: Apache-2.0
"""Observation: events, signs of life, and the health of the machine."""
