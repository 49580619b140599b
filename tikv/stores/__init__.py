"""Memory that knows how many tokens it holds.

`store` has `KVCacheStore` and `pool` has `PagedKVCacheStore`, with the public calls and the lock; `streaming_heads` has
two stores per layer, for heads that keep all tokens and heads that do not. Below them, `layers`
are ways to store layers, `pools` ways to keep tokens in blocks, and `files` is what is on disk. `row_format` says how
rows are stored, `history` which tokens compactions kept, `lengths` which layers a step has not reached, `limits` what
memory there is; `picture` draws a store, and `step` makes a graph of its decode step.
"""
