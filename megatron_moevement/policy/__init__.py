"""Decides: windows, replicas, logs and plans as pure functions of frozen data."""
