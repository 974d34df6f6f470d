# SPDX-License-Identifier: Apache-2.0
"""A simulated cluster that drives the real policy through faults, from one seed."""
