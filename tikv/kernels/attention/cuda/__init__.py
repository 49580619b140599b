"""Attention on any CUDA device in float32, in lanes that share a key: `attend` and `mass` are kernels."""
