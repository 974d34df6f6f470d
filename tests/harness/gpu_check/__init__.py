# SPDX-License-Identifier: Apache-2.0
"""Everything of the project that a GPU can show, in parts: `scripts/gpu_check.sh`."""
