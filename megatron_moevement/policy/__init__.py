"""Decides: windows, replicas, logs, plans and lifecycle as pure functions of frozen data."""
