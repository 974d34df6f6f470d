"""The upstream log: boundary tensors that a rank sent, in host memory."""
