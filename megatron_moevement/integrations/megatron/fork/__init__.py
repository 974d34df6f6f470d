# SPDX-License-Identifier: Apache-2.0
"""The fork of Megatron-Core: a pinned upstream release and a short series of patches.

Standard library only: the builder runs before anything is installed.
"""
