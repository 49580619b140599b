"""The operations of the public API: each checks its arrays once, makes a plan (`plan`), and launches it.

Contiguous caches: `copy`. A batch of sequences, each from its own offset on: `ragged`. Pages: `paged`, `blocks`. int8:
`quantize`. The fused write of a layer: `write_qkv`, with `rope`. Reads: `attention`. Beneath them lie `checks`,
`layouts` (where rows lie), `indices`, `staging` (arrays of the host on a device) and `row_copy` (the copy kernel).
"""
