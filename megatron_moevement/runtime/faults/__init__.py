"""Faults on purpose: where a process passes them, and what they do to it."""
