"""What transformers' continuous batching has to know of attention "tikv", in each version that has it.

Its scheduler decides by the name of a model's attention. While a manager runs, that name is `IN_PAGES`. It counts as
one of flash-attention's kernels, which need no mask, read block tables, and are captured in graphs. Layers, scheduler,
prefix sharing, forks and offloading are transformers' own.

- Before 5.20, attention itself updates the cache. From 5.24 on models call `cache.update` before attention; then keys
  and values pass unchanged, and attention finds the cache among its keywords, as in the versions between.
- Before 5.24, masks are made unless attention has no function for them.
- Sliding layers have no block tables in transformers; their allocator is replaced by one that has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from tikv.errors import OptionError
from tikv.integrations.transformers import shim
from tikv.integrations.transformers.keywords import ATTENTION

IN_PAGES = "tikv_pages"  # the name of attention while a manager runs
FIRST = (5, 18)  # the first version whose allocators of pages are known


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
    for module in (cache, continuous_api, initialization):
        _replace(module, "is_flash_attention_requested", _counting_as_flash)
    _replace(initialization, "ensure_decode_fast_path_is_available", _with_block_tables)
    _replace(cache.PagedAttentionCache, "__init__", _knowing_attention)
    _replace(cache.PagedAttentionCache, "update", _leaving_the_write)
    _replace(cache.PagedAttentionCache, "fill_block_table", _filling_on_host)
    allocators = cache.ATTN_TYPE_TO_ALLOCATOR
    allocators[cache.FULL_ATTENTION] = _full_allocator(allocators[cache.FULL_ATTENTION])
    allocators[cache.SLIDING_ATTENTION] = _ring_allocator(allocators[cache.SLIDING_ATTENTION])


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
        name = shim.attention_of(model.config)
        ours = name in (ATTENTION, IN_PAGES)
        processor = getattr(self, "batch_processor", None)
        if processor is not None and processor.cache.in_pages != ours:
            raise OptionError(
                f'attention "{ATTENTION}": this manager was made for another attention than the one that the model has '
                f'now, "{name}". Call model.destroy_cached_continuous_batching_manager() first.'
            )
        if not ours:
            original(self, model, *args, **kwargs)
        elif name != IN_PAGES:
            model.set_attn_implementation(IN_PAGES)
            self._original_attn_impl = ATTENTION

    return switch_to_cb_friendly_attn


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
        if not self.in_pages or block_table.device.type != "cpu":
            original(self, request_id, past, new, block_table)
            return
        tables = block_table.numpy()  # tensors would take several times as long, for each request of each step
        for allocator in self.cache_allocators.values():
            blocks = allocator.block_table[request_id]
            tables[allocator.index, : len(blocks)] = [n * allocator.pages_of_block for n in blocks]

    return fill_block_table


def _full_allocator(base: Any) -> Any:
    """The allocator of layers that keep all tokens, of whose rows only the first of each page is named."""

    class PagesAllocator(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.in_pages = _is_ours(kwargs["config"] if "config" in kwargs else args[1])
            self.pages_of_block = self.block_physical_stride // self.tokens_per_page

        def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
            """The first row of each page: pages are read where they lie, and a batch may read many tokens."""
            if not self.in_pages:
                return list(super().get_read_indices(request_id, past_length, query_length))
            pages = -(-(past_length + query_length) // self.tokens_per_page)
            return [block * self.block_physical_stride for block in self.block_table[request_id][:pages]]

    PagesAllocator.__name__ = base.__name__
    return PagesAllocator


def _ring_allocator(base: Any) -> Any:
    """The allocator of sliding layers, which also has block tables, and reads a single token in the ring's order."""

    class RingAllocator(base):  # type: ignore[misc]
        supports_block_table = True

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            config = kwargs["config"] if "config" in kwargs else args[1]
            self.in_pages = self.supports_block_table = _is_ours(config)
            self.pages_of_block = self.block_physical_stride // self.tokens_per_page

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

        def fill_block_table(self, request_id: str, past_length: int, query_length: int, block_table: Any) -> None:
            """The pages of the ring, as those of a full layer."""
            super(base, self).fill_block_table(request_id, past_length, query_length, block_table)

    RingAllocator.__name__ = base.__name__
    return RingAllocator
