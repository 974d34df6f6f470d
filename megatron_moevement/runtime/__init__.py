# SPDX-License-Identifier: Apache-2.0
"""Does: host buffers, threads, transports; knows neither Megatron nor NVRx."""
