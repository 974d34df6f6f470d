"""Protection: what processes keep for others, and where."""
