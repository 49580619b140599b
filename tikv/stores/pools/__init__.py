"""What a `PagedKVCacheStore` is made of.

`pages` has the interface of each way to keep tokens in blocks: `row_pages` keeps rows, `group_pages` groups of codes
and the newest rows. `config` says what a pool is, `memory` and `blocks` hold its blocks, `sequences` and
`head_sequences` say which blocks a sequence has, `tables` put that on the device; `append`, `ragged`, `shared_prefix`,
`compaction` and `rows` are parts of the operations.
"""
