# SPDX-License-Identifier: Apache-2.0
"""The window: in which slot each operator is captured as FULL."""
