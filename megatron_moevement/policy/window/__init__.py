"""The window: in which slot each operator is captured as FULL."""
