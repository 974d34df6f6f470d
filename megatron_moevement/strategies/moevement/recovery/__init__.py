"""Recovery: how a generation carries out a plan."""
