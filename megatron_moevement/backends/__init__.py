"""The device under the model: the host (gloo) or CUDA (NCCL)."""
