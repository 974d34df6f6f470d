# SPDX-License-Identifier: Apache-2.0
"""Window schedules: who knows them, and how a job comes to another one."""
