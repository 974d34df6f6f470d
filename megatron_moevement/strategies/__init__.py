"""Strategies: how a job is protected against the loss of processes."""
