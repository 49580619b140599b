"""Memory that knows how many tokens it holds.

`contiguous` is `KVCacheStore`, over `layer` (counts and memory), `append`, `snapshot` and `step`; `growing` is one
layer of it with room that changes. `paged` is `PagedKVCacheStore`, over `pool_form` and `layer_pools` (memory),
`block_pool` and `sequences` (who holds which block), `device_tables` and `paged_files`. Both use `storage`, `files`
and `draw`. `token_groups` is a `KVCacheStore` of other memory, `by_channel`, for one format; importing this package
makes it known to that class.
"""

from tikv.stores import token_groups as _token_groups  # noqa: F401
