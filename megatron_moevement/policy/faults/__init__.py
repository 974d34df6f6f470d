"""Faults: schedules of faults on purpose, and traces of failures."""
