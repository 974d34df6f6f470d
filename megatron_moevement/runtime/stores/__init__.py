# SPDX-License-Identifier: Apache-2.0
"""Stores: the files of each process in host memory, who has them, and what is left of them."""
