# SPDX-License-Identifier: Apache-2.0
"""Everything that knows the names of nvidia-resiliency-ext; it knows nothing of Megatron."""
