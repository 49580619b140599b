"""The operations of the public API: each checks its arrays once, makes a plan (`plan`), and launches it.

`copy` serves contiguous caches; `ragged` a batch of sequences, each with its own offset; `paged` and `blocks` serve
pages; `quantize` makes int8; `write_qkv`, with `rope`, is the fused write of a layer; `attention` reads. All of them
use `checks`, `layouts` (where rows lie), `indices`, `staging` (host arrays on a device) and `row_copy` (copies).
"""
