"""Attention on a CPU, whose vector units compute a row of numbers at a time: `attend` and `mass` are kernels."""
