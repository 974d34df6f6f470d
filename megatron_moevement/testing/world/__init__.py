"""A simulated cluster that drives the real policy through faults, from one seed."""
