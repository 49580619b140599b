"""What a `PagedKVCacheStore` is made of.

`config` says what a pool is, `memory` and `blocks` hold its pages, `sequences` and `head_sequences` say which pages a
sequence has, `tables` put that on the device; `append`, `attend`, `ragged`, `compaction` and `rows` do the work.
"""
