"""MoEvement on Megatron-Core: fault-tolerant training of Mixture-of-Experts models.

Importing the package imports nothing heavy; each layer is imported where it is used.
"""

__version__ = "0.1.0"
