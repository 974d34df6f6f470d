"""MoEvement: sparse checkpointing, upstream logging and localized recovery."""
