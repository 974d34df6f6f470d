# SPDX-License-Identifier: Apache-2.0
"""Recovery: how a generation carries out a plan."""
