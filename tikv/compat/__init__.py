"""Peers' own function names, argument names, argument orders and results, on every back end of this library.

`vllm`, `flashinfer`, `flash_attn` and `mlx` are modules named after what they stand in for. An option that is not
offered raises `tikv.OptionError` with its name; nothing is ignored silently.
"""
