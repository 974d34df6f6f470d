# SPDX-License-Identifier: Apache-2.0
"""What a job takes and needs, before it starts."""
