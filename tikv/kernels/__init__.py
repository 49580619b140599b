"""Device code, and nothing else: cached factories that close over compile-time choices and return Taichi kernels.

`codec` turns words into values and back, `address` turns tokens into slots and slots into words, and `copy` is the one
kernel for every copy; `write_qkv` splits, normalises, rotates and writes; `attention` reads.
"""
