# SPDX-License-Identifier: Apache-2.0
"""The device under the model: the host (gloo) or CUDA (NCCL)."""
