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
from tikv.integrations.transformers.batching import page_memory
from tikv.integrations.transformers.batching.allocators import full_allocator, is_in_pages, ring_allocator
from tikv.integrations.transformers.batching.page_memory import PageFormat, name_of
from tikv.integrations.transformers.memory.storage import Storage, share_memory_with
from tikv.integrations.transformers.names import ATTENTION, ATTENTION_CALL, IN_PAGES, PAGES
from tikv.integrations.transformers.versions.configurations import attention_of
from tikv.integrations.transformers.versions.installed import MODELS_UPDATE_PAGES, VERSION

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
    if VERSION < FIRST:
        _replace(manager, "__init__", _refusing)
        return
    from transformers.generation.continuous_batching import cache, continuous_api, initialization

    AttentionInterface.register(IN_PAGES, torch.compiler.disable(attend))
    if MODELS_UPDATE_PAGES:
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
    full = cache.FullAttentionCacheAllocator = full_allocator(full)
    cache.ATTN_TYPE_TO_ALLOCATOR.update({cache.FULL_ATTENTION: full, cache.SLIDING_ATTENTION: ring_allocator(ring)})


def _replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(wrap(original)))


def _refusing(original: Any) -> Any:
    def init(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if attention_of(model.config) == ATTENTION:
            needed = ".".join(map(str, FIRST))
            raise OptionError(
                f"{ATTENTION_CALL}: continuous batching needs transformers {needed} or newer. Install it, or "
                'call model.set_attn_implementation("sdpa") before generate_batch.'
            )
        original(self, model, *args, **kwargs)

    return init


def _switching(original: Any) -> Any:
    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        name, storage = attention_of(model.config), page_memory.storage_in_use()
        ours = name in (ATTENTION, IN_PAGES)
        processor = getattr(self, "batch_processor", None)
        if processor is not None and processor.cache.in_pages != ours:
            raise OptionError(
                f"{ATTENTION_CALL}: this manager was made for another attention than the one that the model has "
                f'now, "{name}". Call model.destroy_cached_continuous_batching_manager() first.'
            )
        if not ours:
            if storage is not None:
                raise OptionError(
                    f'{PAGES}: the model has attention "{name}". Call '
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
                f"{PAGES}: the model keeps a manager whose pages hold {name_of(self.tikv_storage)}, "
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
    if storage is not None and VERSION < FIRST:
        needed = ".".join(map(str, FIRST))
        raise OptionError(f"{PAGES}: this needs transformers {needed} or newer. Install it.")
    for manager in list(_managers):
        reused = getattr(manager.model, "_cached_continuous_batching_manager", None) is manager
        if (reused or manager.is_running()) and manager.tikv_storage != storage:
            raise OptionError(
                f"{PAGES}: a manager of continuous batching exists whose pages hold "
                f"{name_of(manager.tikv_storage)}. Stop it, or call "
                "model.destroy_cached_continuous_batching_manager(), before its pages are to hold "
                f"{name_of(storage)}."
            )


def _making_pages(original: Any) -> Any:
    def _create_batch_processor(self: Any) -> Any:
        with page_memory.making(getattr(self, "tikv_pages", None)):
            processor = original(self)
        if self.model.device.type == "cuda":  # batches run on a stream of their own, which must wait for the zeros
            zeroed_on = torch.cuda.current_stream(self.model.device)
            processor.inputs_and_outputs.compute_stream.wait_stream(zeroed_on)
        return processor

    return _create_batch_processor


def _gathering_nothing(original: Any) -> Any:
    def bytes_per_cache_token(self: Any) -> int:
        """Without the copy that other attention makes of keys and values; a sliding layer may copy its windows."""
        from transformers.generation.continuous_batching import cache, utils

        nbytes = int(original(self))
        if not is_in_pages(self.config) or cache.SLIDING_ATTENTION in cache.group_layers_by_attn_type(self.config):
            return nbytes
        return nbytes - int(self.kv_heads_at_peak * utils.find_head_dim(self.config) * self.activation_dtype.itemsize)

    return bytes_per_cache_token


def _counting_as_flash(original: Any) -> Any:
    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, **kwargs: Any
    ) -> bool:
        name = requested_attention_implementation if config is None else config._attn_implementation
        return name == IN_PAGES or original(config, requested_attention_implementation, **kwargs)

    return is_flash_attention_requested


def _with_block_tables(original: Any) -> Any:
    def ensure_decode_fast_path_is_available(config: Any, *args: Any, **kwargs: Any) -> None:
        if not is_in_pages(config):  # otherwise it is, on each device and for each type of layer
            original(config, *args, **kwargs)

    return ensure_decode_fast_path_is_available


def _knowing_attention(original: Any) -> Any:
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        self.in_pages = is_in_pages(config)

    return init


def check_attention(cache: Any) -> None:
    """Check that the model still has the attention that the cache was made for.

    Raises:
        OptionError: it was changed. Masks and block tables are made for one kind of attention only.
    """
    name = attention_of(cache.config)
    if cache.in_pages != (name == IN_PAGES):
        raise OptionError(
            f'{ATTENTION_CALL}: the attention of the model was changed to "{name}" while a manager of '
            "continuous batching runs. Stop the manager first."
        )


def _leaving_the_write(original: Any) -> Any:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(self: Any, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        check_attention(self)
        if not self.in_pages:
            return original(self, key_states, value_states, *args, **kwargs)
        kwargs["kwargs"]["cache"] = self  # `attend` gets it, and writes the new keys and values itself
        return key_states, value_states

    return update


def _filling_on_host(original: Any) -> Any:
    def fill_block_table(self: Any, request_id: str, past: int, new: int, block_table: torch.Tensor) -> None:
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
        if format is None or not is_in_pages(self.config):
            return tokens, sectors
        heads = getattr(self, "num_key_value_heads", format.heads)  # of this rank, in newer versions
        most = format.with_heads(heads).most_tokens // self.tokens_per_sector - 2
        if self.cb_config.num_blocks is not None and sectors > most:
            raise CapacityError(
                f"{PAGES}: num_blocks={self.cb_config.num_blocks} are more than a layer's memory can "
                f"have, about {most * self.bytes_per_sector // self.bytes_per_block}. Use fewer."
            )
        return tokens, min(sectors, most)

    return infer_max_batch_tokens_and_num_sectors
