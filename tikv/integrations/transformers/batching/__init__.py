"""transformers' continuous batching over this library's pages.

`managers` is what its managers learn of attention "tikv". `allocators` hands out pages, `page_memory` is their memory,
and `attend` attends over them. `page_formats` has `pages`.
"""
