"""The differences between transformers' versions that concern caches. Nothing else in this package asks for a version.

The docstring of each module lists them: `configurations` for models, `masks`, `caches`, and `generate`. `installed` is
the version.
"""
