"""`captured`, a loop in place of `generate`'s own: `custom_generate` is what users pass.

`loop` runs the steps of a text, and `replays` captures them in graphs.
"""
