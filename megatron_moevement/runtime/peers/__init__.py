# SPDX-License-Identifier: Apache-2.0
"""Peers: slots, logs and live state between processes, over connections of their own."""
