"""Capture: the slot of every committed step."""
