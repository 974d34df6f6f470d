# SPDX-License-Identifier: Apache-2.0
"""The upstream log: boundary tensors that a rank sent, in host memory."""
