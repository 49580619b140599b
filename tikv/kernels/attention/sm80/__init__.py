"""Attention on the tensor cores of compute capability 8.0 and later: `attend`, and `channels` for keys by channel.

`mass` weighs the keys for ``return_mass``.
"""
