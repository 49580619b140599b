"""Attention in blocks of threads that share a task: on Vulkan and Metal, and on CUDA where no other kernel serves."""
