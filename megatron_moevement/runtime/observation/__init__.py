"""Observation: events, signs of life, and the health of the machine."""
