"""Interrupts: waits that a restart can end, and what is left of a former generation."""
