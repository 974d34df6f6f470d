# SPDX-License-Identifier: Apache-2.0
"""The host-memory store: files that keep slots and ledger when their process is killed."""
