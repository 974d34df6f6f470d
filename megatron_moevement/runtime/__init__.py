"""Does: host buffers, threads, transports; knows neither Megatron nor NVRx."""
