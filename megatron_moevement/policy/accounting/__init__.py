# SPDX-License-Identifier: Apache-2.0
"""The account of a job: what every second of each of its processes was, from their events."""
