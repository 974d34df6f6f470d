"""Watching: time limits of sections, and ranks that are slow."""
