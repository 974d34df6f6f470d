"""What a job takes and needs, before it starts."""
