"""Facts: what processes publish before a recovery, and what is read out of it."""
