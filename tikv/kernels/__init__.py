"""Device code, and nothing else: cached factories that close over compile-time choices and return Taichi kernels.

`codec` turns words into values and back, `address` turns tokens into slots and slots into words, `copy` is the one
kernel every copy is; `write_qkv` splits, normalises, rotates and writes; `attention` reads.
"""
