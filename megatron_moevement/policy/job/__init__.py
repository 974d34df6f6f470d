# SPDX-License-Identifier: Apache-2.0
"""The job: its ranks and operators, its stages and what crosses their boundaries."""
