"""Coordination: agreements, the commit barrier, generations, the ledger."""
