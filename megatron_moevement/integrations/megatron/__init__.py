"""Everything that knows Megatron-Core's names."""
