"""What transformers' continuous batching has to know of attention "tikv", in each version that has it.

Its scheduler decides by the name of a model's attention. While a manager runs, that name is `IN_PAGES`. It counts as
one of flash-attention's kernels, which need no mask, read block tables, and are captured in graphs. Layers, scheduler,
prefix sharing, forks and offloading are transformers' own.

- Before 5.20, attention itself updates the cache. From 5.24 on models call `cache.update` before attention; then keys
  and values pass unchanged, and attention finds the cache among its keywords, as in the versions between.
- Before 5.24, masks are made unless attention has no function for them.
- Sliding layers have no block tables in transformers; their allocator is replaced by one that has.
- Pages have the model's dtype in transformers; the allocators make them, and count their bytes, in any format.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from tikv.errors import CapacityError, OptionError
from tikv.integrations.transformers import page_memory, shim
from tikv.integrations.transformers.keywords import ATTENTION
from tikv.integrations.transformers.page_memory import PageFormat, PageMemory, name_of
from tikv.integrations.transformers.storage import Storage, share_memory_with

IN_PAGES = "tikv_pages"  # the name of attention while a manager runs
FIRST = (5, 18)  # the first version whose allocators of pages are known

_managers: weakref.WeakSet[Any] = weakref.WeakSet()  # those whose models have attention "tikv"


def install(attend: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Register attention under `IN_PAGES`, and let transformers' managers use it for models with attention "tikv".

    Args:
        attend: the attention function.
        mask: its mask function.
    """
    try:
        from transformers.generation.continuous_batching import ContinuousBatchingManager as manager
    except ImportError:  # this version has no continuous batching, or a package that it needs is missing
        return
    if hasattr(manager, "tikv_installed"):
        return
    manager.tikv_installed = True
    if shim.VERSION < FIRST:
        _replace(manager, "__init__", _refusing)
        return
    from transformers.generation.continuous_batching import cache, continuous_api, initialization

    AttentionInterface.register(IN_PAGES, torch.compiler.disable(attend))
    if shim.MODELS_UPDATE_PAGES:
        AttentionMaskInterface.register(IN_PAGES, mask)
    _replace(manager, "switch_to_cb_friendly_attn", _switching)
    _replace(manager, "_create_batch_processor", _making_pages)
    for module in (cache, continuous_api, initialization):
        _replace(module, "is_flash_attention_requested", _counting_as_flash)
    _replace(initialization, "ensure_decode_fast_path_is_available", _with_block_tables)
    _replace(cache.PagedAttentionCache, "__init__", _knowing_attention)
    _replace(cache.PagedAttentionCache, "update", _leaving_the_write)
    _replace(cache.PagedAttentionCache, "fill_block_table", _filling_on_host)
    handler = cache.PagedAttentionMemoryHandler
    _replace(handler, "infer_max_batch_tokens_and_num_sectors", _addressing_all)
    handler.bytes_per_cache_token = property(_gathering_nothing(handler.bytes_per_cache_token.fget))
    full, ring = (cache.ATTN_TYPE_TO_ALLOCATOR[kind] for kind in (cache.FULL_ATTENTION, cache.SLIDING_ATTENTION))
    full = cache.FullAttentionCacheAllocator = _full_allocator(full)
    cache.ATTN_TYPE_TO_ALLOCATOR.update({cache.FULL_ATTENTION: full, cache.SLIDING_ATTENTION: _ring_allocator(ring)})


def _replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(wrap(original)))


def _refusing(original: Any) -> Any:
    def init(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if shim.attention_of(model.config) == ATTENTION:
            needed = ".".join(map(str, FIRST))
            raise OptionError(
                f'attention "{ATTENTION}": continuous batching needs transformers {needed} or newer. Install it, or '
                'call model.set_attn_implementation("sdpa") before generate_batch.'
            )
        original(self, model, *args, **kwargs)

    return init


def _switching(original: Any) -> Any:
    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        name, storage = shim.attention_of(model.config), page_memory.storage_in_use()
        ours = name in (ATTENTION, IN_PAGES)
        processor = getattr(self, "batch_processor", None)
        if processor is not None and processor.cache.in_pages != ours:
            raise OptionError(
                f'attention "{ATTENTION}": this manager was made for another attention than the one that the model has '
                f'now, "{name}". Call model.destroy_cached_continuous_batching_manager() first.'
            )
        if not ours:
            if storage is not None:
                raise OptionError(
                    f'{page_memory.OPERATION}: the model has attention "{name}". Call '
                    f'model.set_attn_implementation("{ATTENTION}") first.'
                )
            original(self, model, *args, **kwargs)
            return
        if not hasattr(self, "tikv_pages"):
            with share_memory_with(model.device):
                self.tikv_pages = _format_of(storage, model)
            self.tikv_storage = storage
            _managers.add(self)
        elif self.tikv_storage != storage:
            raise OptionError(
                f"{page_memory.OPERATION}: the model keeps a manager whose pages hold {name_of(self.tikv_storage)}, "
                f"and now they should hold {name_of(storage)}. Call model.destroy_cached_continuous_batching_manager() "
                "first."
            )
        if name != IN_PAGES:
            model.set_attn_implementation(IN_PAGES)
            self._original_attn_impl = ATTENTION

    return switch_to_cb_friendly_attn


def _format_of(storage: Storage | None, model: Any) -> PageFormat:
    """The format of a model's pages; raises if its keys and values cannot be kept so."""
    from transformers.generation.continuous_batching import utils

    config = model.config.get_text_config()
    heads, width = utils.find_num_key_value_heads(config), utils.find_head_dim(config)
    return PageFormat.of_model(storage, model.dtype, heads, width)


def check_enters(storage: Storage | None) -> None:
    """Check that pages can be made as `pages` asks, and that no manager has others.

    Raises:
        OptionError: this version's pages are not known, or a manager with other pages runs, or is kept by its model.
    """
    if storage is not None and shim.VERSION < FIRST:
        needed = ".".join(map(str, FIRST))
        raise OptionError(f"{page_memory.OPERATION}: this needs transformers {needed} or newer. Install it.")
    for manager in list(_managers):
        reused = getattr(manager.model, "_cached_continuous_batching_manager", None) is manager
        if (reused or manager.is_running()) and manager.tikv_storage != storage:
            raise OptionError(
                f"{page_memory.OPERATION}: a manager of continuous batching exists whose pages hold "
                f"{name_of(manager.tikv_storage)}. Stop it, or call "
                "model.destroy_cached_continuous_batching_manager(), before its pages are to hold "
                f"{name_of(storage)}."
            )


def _making_pages(original: Any) -> Any:
    def _create_batch_processor(self: Any) -> Any:
        with page_memory.making(getattr(self, "tikv_pages", None)):
            return original(self)

    return _create_batch_processor


def _gathering_nothing(original: Any) -> Any:
    def bytes_per_cache_token(self: Any) -> int:
        """Without the copy that other attention makes of keys and values; a sliding layer may copy its windows."""
        from transformers.generation.continuous_batching import cache, utils

        nbytes = int(original(self))
        if not _is_ours(self.config) or cache.SLIDING_ATTENTION in cache.group_layers_by_attn_type(self.config):
            return nbytes
        return nbytes - int(self.kv_heads_at_peak * utils.find_head_dim(self.config) * self.activation_dtype.itemsize)

    return bytes_per_cache_token


def _is_ours(config: Any) -> bool:
    return shim.attention_of(config) == IN_PAGES


def _counting_as_flash(original: Any) -> Any:
    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, **kwargs: Any
    ) -> bool:
        name = requested_attention_implementation if config is None else config._attn_implementation
        return name == IN_PAGES or original(config, requested_attention_implementation, **kwargs)

    return is_flash_attention_requested


def _with_block_tables(original: Any) -> Any:
    def ensure_decode_fast_path_is_available(config: Any, *args: Any, **kwargs: Any) -> None:
        if not _is_ours(config):  # otherwise it is, on each device and for each type of layer
            original(config, *args, **kwargs)

    return ensure_decode_fast_path_is_available


def _knowing_attention(original: Any) -> Any:
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        self.in_pages = _is_ours(config)

    return init


def check_attention(cache: Any) -> None:
    """Check that the model still has the attention that the cache was made for.

    Raises:
        OptionError: it was changed. Masks and block tables are made for one kind of attention only.
    """
    name = shim.attention_of(cache.config)
    if cache.in_pages != (name == IN_PAGES):
        raise OptionError(
            f'attention "{ATTENTION}": the attention of the model was changed to "{name}" while a manager of '
            "continuous batching runs. Stop the manager first."
        )


def _leaving_the_write(original: Any) -> Any:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        check_attention(self)
        if not self.in_pages:
            return original(self, key_states, value_states, *args, **kwargs)
        kwargs["kwargs"]["cache"] = self  # `attend` gets it, and writes the new keys and values itself
        return key_states, value_states

    return update


def _filling_on_host(original: Any) -> Any:
    def fill_block_table(self: Any, request_id: str, past: int, new: int, block_table: Any) -> None:
        if not self.in_pages:
            original(self, request_id, past, new, block_table)
            return
        # On the host, tensors would take several times as long, for each request of each step.
        tables = block_table.numpy() if block_table.device.type == "cpu" else block_table
        for allocator in self.cache_allocators.values():
            blocks = allocator.block_table[request_id]
            pages = list(map(allocator.memory.page_of, blocks))
            tables[allocator.index, : len(pages)] = pages if tables is not block_table else torch.tensor(pages)

    return fill_block_table


def _addressing_all(original: Any) -> Any:
    def infer_max_batch_tokens_and_num_sectors(self: Any) -> tuple[int, int]:
        tokens, sectors = original(self)
        format = page_memory.format_in_making()
        if format is None or not _is_ours(self.config):
            return tokens, sectors
        heads = getattr(self, "num_key_value_heads", format.heads)  # of this rank, in newer versions
        most = format.with_heads(heads).most_tokens // self.tokens_per_sector - 2
        if self.cb_config.num_blocks is not None and sectors > most:
            raise CapacityError(
                f"{page_memory.OPERATION}: num_blocks={self.cb_config.num_blocks} are more than a layer's memory can "
                f"have, about {most * self.bytes_per_sector // self.bytes_per_block}. Use fewer."
            )
        return tokens, min(sectors, most)

    return infer_max_batch_tokens_and_num_sectors


def _in_formats(base: Any) -> Any:
    """An allocator whose pages lie as `page_memory` says, if the model has attention "tikv"."""

    class FormatAllocator(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            config = kwargs["config"] if "config" in kwargs else args[1]
            self.in_pages = _is_ours(config)
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


def _full_allocator(original: Any) -> Any:
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


def _ring_allocator(original: Any) -> Any:
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
