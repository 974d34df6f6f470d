# SPDX-License-Identifier: Apache-2.0
"""MoEvement on Megatron-Core: fault-tolerant training of Mixture-of-Experts models.

Importing the package imports nothing heavy; each layer is imported where it is used.
"""

import warnings

__version__ = "0.1.0"

# nvidia-resiliency-ext brings this package; torch imports it and would tell every user so.
warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)
