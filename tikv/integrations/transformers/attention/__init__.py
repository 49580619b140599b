"""Attention "tikv": `attend` is what models call, and `masks` makes what it needs beside keys and values.

`keywords` lists what models pass. `prompts` attends to a prompt without a mask, `chosen` over the keys that a model
chose, and `latents` over keys and values that are not expanded.
"""
