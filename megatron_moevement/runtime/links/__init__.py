# SPDX-License-Identifier: Apache-2.0
"""What links between processes bring, before a job starts."""
