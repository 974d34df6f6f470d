"""The host-memory store: files that keep slots and ledger when their process is killed."""
