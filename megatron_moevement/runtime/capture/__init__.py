# SPDX-License-Identifier: Apache-2.0
"""Capture: copies of live tensors into host memory, beside the training thread."""
