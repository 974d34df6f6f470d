"""Capture: copies of live tensors into host memory, beside the training thread."""
