"""The allocators of transformers' continuous batching, of pages that lie in this library's layout and in any format.

Those of other attention stay as they are. Sliding layers have no block tables in transformers; these have.
"""

from __future__ import annotations

from typing import Any

from tikv.integrations.transformers.batching import page_memory
from tikv.integrations.transformers.batching.page_memory import PageFormat, PageMemory
from tikv.integrations.transformers.names import IN_PAGES
from tikv.integrations.transformers.versions.configurations import attention_of


def is_in_pages(config: Any) -> bool:
    """Whether the model of a configuration has attention "tikv", and a manager runs."""
    return attention_of(config) == IN_PAGES


def _in_formats(base: Any) -> Any:
    """An allocator whose pages lie as `page_memory` says, if the model has attention "tikv"."""

    class FormatAllocator(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            config = kwargs["config"] if "config" in kwargs else args[1]
            self.in_pages = is_in_pages(config)
            super().__init__(*args, **kwargs)

        @classmethod
        def get_bytes_per_page(cls, heads: int, width: int, cache_dtype: Any, page_size: int) -> int:
            format = page_memory.format_in_making()
            if format is None:
                return int(super().get_bytes_per_page(heads, width, cache_dtype, page_size))
            return page_size * format.with_heads(heads).nbytes

        def register_cache_tensor(self, bytes_per_sector: int, non_trash: int, cache_tensor: Any, pool: Any) -> None:
            if not self.in_pages:
                super().register_cache_tensor(bytes_per_sector, non_trash, cache_tensor, pool)
                return
            heads, width = self.num_key_value_heads, self.head_dim
            format = page_memory.format_in_making() or PageFormat.of_model(None, self.cache_dtype, heads, width)
            self.bytes_per_sector = bytes_per_sector
            self._after_cache_tensor_init(non_trash, bytes_per_sector, cache_tensor, pool)
            self.memory = self._copy_view = PageMemory(
                format.with_heads(heads), cache_tensor, page=self.tokens_per_page, width=width,
                sectors=non_trash // bytes_per_sector + 2, blocks=self.blocks_per_sector,
                layers=len(self.layer_indices),
            )  # fmt: skip
            self.write_trash_index = self.memory.page_of(self.blocks_per_sector) * self.tokens_per_page

        def rows(self, request_id: str, first: int, end: int) -> list[int]:
            """The rows of a request's slots first..end."""
            blocks, page, rows = self.block_table[request_id], self.tokens_per_page, list[int]()
            while first < end:
                number, offset = divmod(first, page)
                count = min(end - first, page - offset)
                row = self.memory.page_of(blocks[number]) * page + offset
                rows.extend(range(row, row + count))
                first += count
            return rows

    FormatAllocator.__name__ = base.__name__
    return FormatAllocator


def full_allocator(original: Any) -> Any:
    """The allocator of layers that keep all tokens, of whose rows only the first of each page is named."""
    base: Any = _in_formats(original)

    class PagesAllocator(base):  # type: ignore[misc]
        def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
            """The first row of each page: pages are read where they lie, and a batch may read many tokens."""
            if not self.in_pages:
                return list(super().get_read_indices(request_id, past_length, query_length))
            page = self.tokens_per_page
            pages = -(-(past_length + query_length) // page)
            return [self.memory.page_of(block) * page for block in self.block_table[request_id][:pages]]

        def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
            if not self.in_pages:
                return list(super().get_write_indices(request_id, past_length, query_length))
            return list(self.rows(request_id, past_length, past_length + query_length))

    PagesAllocator.__name__ = original.__name__
    return PagesAllocator


def ring_allocator(original: Any) -> Any:
    """The allocator of sliding layers, which also has block tables, and reads a single token in the ring's order."""
    base: Any = _in_formats(original)

    class RingAllocator(base):  # type: ignore[misc]
        supports_block_table = True

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.supports_block_table = self.in_pages

        def get_seqlen_k(self, past_length: int, query_length: int) -> int:
            """All tokens: what is read follows from the window, and where the next one is written does not."""
            if not self.in_pages:
                return int(super().get_seqlen_k(past_length, query_length))
            return past_length + query_length

        def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
            """For one new token, which may be written before the others are read, the slots of the ring in order."""
            if not self.in_pages or query_length != 1:
                return list(super().get_read_indices(request_id, past_length, query_length))
            held = min(past_length + 1, self.sliding_window)
            rows = list(self._token_indices_to_physical_indices(request_id, 0, held))
            rows[past_length % self.sliding_window] = self.sentinel_index
            return rows

        def _token_indices_to_physical_indices(self, request_id: str, start_index: int, length: int) -> list[int]:
            """The rows of tokens, of which there are at most as many as slots."""
            if not self.in_pages:
                return list(super()._token_indices_to_physical_indices(request_id, start_index, length))
            first = start_index % self.sliding_window
            end = min(first + length, self.sliding_window)
            return [*self.rows(request_id, first, end), *self.rows(request_id, 0, length - (end - first))]

    RingAllocator.__name__ = original.__name__
    return RingAllocator
