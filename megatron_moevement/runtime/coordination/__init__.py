# SPDX-License-Identifier: Apache-2.0
"""Coordination: agreements, the commit barrier, generations, the ledger."""
