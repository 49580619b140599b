"""Attention on CUDA's tensor cores: over rows of float16 or bfloat16, over codes, and over keys by channel."""

from __future__ import annotations

from typing import Any

from tikv import launch, runtime
from tikv.kernels.attention.sm80 import attend, channels, coded, copies, floats, halves, mass
from tikv.kernels.attention.sm80.instructions import HALVES
from tikv.kernels.attention.sm80.kinds import kind_of
from tikv.kernels.attention.sm80.staged import KEYS
from tikv.ops.attention.families.cuda import Cuda
from tikv.ops.attention.families.family import MassKernel, columns_of, most_splits, rows_evenly, rows_of_one_query
from tikv.ops.attention.families.form import Form
from tikv.ops.attention.options import MOST_ROWS
from tikv.ops.attention.splits import MASS_KEYS, fewest_splits

SUM_ORDER = "tikv.init(invariant=True) is set, and the order of their sums depends on the queries"


class Tiles(Cuda):
    """Kernels whose blocks compute tiles of query rows: what those of the tensor cores have in common.

    Attributes:
        tile: how the warps of a block share the work.
    """

    on_tensor_cores = True
    factory: Any  # of the kernel that attends
    in_order: Any = None  # the same under `invariant`, for families that serve it

    def __init__(self, form: Form) -> None:
        self.tile = self.tile_of(form)
        super().__init__(form)
        self.rows = rows_of_tile(self.tile, self.group, self.query.queries, self.selects)
        if not why_no_mass_in_tiles(form):
            storage = form.cache.k.storage
            of_codes = (
                0 if storage in HALVES else kind_of(storage).word_bits(storage, self.cache.width, self.cache.width_v)[0]
            )
            self.mass_bits = of_codes or halves.WORD_BITS

    @classmethod
    def needs_native(cls, form: Form) -> bool:
        return bool(launch.why_no_bitcode(form.live))

    def tile_of(self, form: Form) -> Any:
        """How the warps of a block share the work."""
        raise NotImplementedError

    def attend_kernel(self, choices: Any, workers: int, paired: bool) -> tuple[Any, tuple[Any, ...]]:
        return (self.in_order if self.live.invariant else self.factory), (self.tile,)

    def mass_kernel(self, choices: Any, workers: int, by_slot: bool, greatest: bool) -> MassKernel:
        if not self.mass_bits:
            return super().mass_kernel(choices, workers, by_slot, greatest)
        of_codes = choices.cache not in HALVES
        tile, unit = mass.tile_of(choices.width, of_codes), 1 if of_codes else mass.QUERY_UNIT
        parts = MASS_KEYS // tile.keys
        return MassKernel(mass.make_mass_tensor, (tile, by_slot, greatest), False, parts, unit, selects=False)

    def splits_of(self, keys: int) -> int:
        tile, processors = self.tile, launch.multiprocessors(self.live)
        return fewest_splits(self.tasks, most_splits(keys), processors, tile.resident, tile.filling)


def rows_of_tile(tile: Any, group: int, queries: int, selects: bool = False) -> int:
    """Query rows of a task; those of the tile, if warps exchange logits, as they do in prompts too."""
    if selects or (queries > 1 and tile.of_one_query):
        return rows_of_one_query(group, tile.rows)
    exchange = getattr(tile, "shared_out", None) == "exchange"  # tiles of warpgroups share nothing out among warps
    return int(tile.rows) if queries > 1 or exchange else rows_evenly(group, tile.rows)


def why_no_mass_in_tiles(form: Form) -> str:
    """Why tensor cores do not weigh the keys for ``return_mass``; empty if they do."""
    if reason := launch.why_no_bitcode(form.live):
        return reason
    if form.live.invariant:
        return "tikv.init(invariant=True) is set, and few queries are weighed by another kernel"
    if form.rows <= MOST_ROWS:
        return f"a KV head has {form.rows} query rows, which lanes hold at once"
    if form.selects:
        return "each query chooses its own tokens"
    if form.cache.k.storage not in HALVES:
        return TensorCodes.why_not(form)
    if reason := TensorRows.why_no_products(form):
        return reason
    if form.cache.width not in attend.WIDTHS:
        return form.widths
    return form.why_not_queries(mass.QUERY_UNIT * form.arrays["q"].dtype.itemsize)


def why_not_in_order(live: runtime.Runtime) -> str:
    """Why the kernels cannot keep the order of sums that `invariant` needs; empty if they can, or need not."""
    if live.invariant and (reason := launch.why_not_native(live)):
        return f"tikv.init(invariant=True) is set, and {reason}"  # others may fuse products with sums
    return ""


class TensorRows(Tiles):
    """Calls whose q, K and V are of one type, float16 or bfloat16: tensor cores multiply them as they are stored."""

    title = "tensor cores over rows"
    serves = (
        "q, K and V of one dtype, float16 or bfloat16; heads of "
        f"{columns_of(attend.WIDTHS)}, or keys of {columns_of(attend.WIDE)} with values of "
        f"{columns_of(attend.WIDE_V)}; no sink logits, slopes, masks or trees"
    )

    factory, in_order = staticmethod(attend.make_attend_tensor), staticmethod(attend.make_attend_tensor_in_order)

    @classmethod
    def why_not(cls, form: Form) -> str:
        return cls.why_no_products(form) or form.why_not_terms

    @staticmethod
    def why_no_products(form: Form) -> str:
        """Why tensor cores cannot multiply q, K and V as they are stored; empty if they can."""
        live, cache = form.live, form.cache
        if reason := launch.why_no_tensor_cores(live):
            return reason
        if reason := why_not_in_order(live):
            return reason
        q, k, v = (form.arrays[name].dtype for name in "qkv")
        if cache.k.storage not in HALVES:
            return f"K and V are {form.stored}"
        if v is not k or q is not k:
            return f"q is {q.name}, K {k.name}, V {v.name}"
        if not attend.serves_widths(cache.width, cache.width_v):
            return form.widths
        return form.why_not_pieces or form.why_not_begin_at(attend.ROW_BYTES)

    def words_of(self, form: Form) -> tuple[int, int]:
        return halves.WORD_BITS, halves.WORD_BITS

    def tile_of(self, form: Form) -> Any:
        cache = form.cache
        long = form.options.softcap is not None or cache.sinks > 0
        if form.live.invariant:
            long = long or form.selects or cache.kind == "ring" or cache.page % KEYS != 0
            return attend.invariant_tile_of(cache.width, cache.width_v, form.rows, long)
        return attend.tile_of(max(cache.width, cache.width_v), form.rows, long=_is_long(form, long))


class TensorCodes(Tiles):
    """Calls over int8, 8-bit floats or groups of codes, which warps convert to float16 for the tensor cores."""

    title = "tensor cores over codes"
    serves = (
        "K and V of one format: int8, 8-bit floats, or groups of "
        f"{' or '.join(map(str, coded.BITS))} bits; q of float16 or bfloat16; heads of "
        f"{columns_of(coded.WIDTHS)}; no sink logits, slopes, masks or trees"
    )

    factory, in_order = staticmethod(attend.make_attend_tensor), staticmethod(attend.make_attend_tensor_in_order)

    @classmethod
    def why_not(cls, form: Form) -> str:
        cache, storage = form.cache, form.cache.k.storage
        q, widths = form.arrays["q"].dtype, (form.cache.width, form.cache.width_v)
        if reason := launch.why_no_tensor_cores(form.live):
            return reason
        if reason := why_not_in_order(form.live):
            return reason
        if storage in floats.NEEDS_NATIVE and (reason := launch.why_no_hopper(form.live)):
            return f"K and V are {form.stored}, and {reason}"
        if storage in HALVES or coded.codes_of(storage, cache.width) is None or not cache.alike:
            return f"K and V are {form.stored}"
        if q.short not in coded.QUERIES:
            return f"q is {q.name}, over codes"
        if not {*widths} <= {*coded.WIDTHS}:
            return form.widths
        if 0 in kind_of(storage).word_bits(storage, *widths):
            return f"{form.widths}, and threads cannot share whole words of {storage}"
        why_not_rows = form.why_not_pieces or form.why_not_begin_at(attend.ROW_BYTES)
        return _why_not_scales(form) or why_not_rows or form.why_not_terms

    @classmethod
    def needs_native(cls, form: Form) -> bool:
        by_storage = not form.live.invariant and form.cache.k.storage in floats.NEEDS_NATIVE
        return by_storage or super().needs_native(form)

    def words_of(self, form: Form) -> Any:
        storage = form.cache.k.storage
        return kind_of(storage).word_bits(storage, form.cache.width, form.cache.width_v)

    def tile_of(self, form: Form) -> Any:
        cache, long = form.cache, form.options.softcap is not None or form.cache.sinks > 0
        width, storage, copied = max(cache.width, cache.width_v), cache.k.storage, _copies_tiles(form)
        if form.live.invariant:  # warps divide the keys, in prompts too; four blocks have too few registers
            return attend.tile_of(width, attend.ROWS, storage, _is_long(form, long), copied, most=3)
        return attend.tile_of(width, form.rows, storage, _is_long(form, long), copied)


class TensorChannels(Tiles):
    """Calls over keys that are codes by channel, see `CacheLayout.by_channel`, on tensor cores."""

    title = "tensor cores over keys by channel"
    serves = (
        f'K in groups of {channels.GROUP} tokens, `axis="tokens"`, of {" or ".join(map(str, coded.BITS))} bits; V of '
        f"float16, bfloat16 or such codes; heads of {columns_of(coded.WIDTHS)}; without `invariant=True`"
    )

    factory = staticmethod(channels.make_attend_channels)

    @classmethod
    def why_not(cls, form: Form) -> str:
        cache, q = form.cache, form.arrays["q"].dtype
        if not cache.by_channel:
            return "keys are stored by token"
        if form.live.invariant:
            return SUM_ORDER
        if reason := launch.why_no_bitcode(form.live) or launch.why_no_tensor_cores(form.live):
            return reason  # no other family reads keys by channel, if this kernel was not made beforehand
        storage, group = cache.v.storage, channels.GROUP
        codes, of_values = coded.codes_of(cache.k.storage, group), coded.codes_of(storage, cache.width_v)
        if codes is None or (codes.group, codes.numbers) != (group, 2):
            return f"K is {cache.k.format} by channel"
        if q.short not in coded.QUERIES:
            return f"q is {q.name}, over codes by channel"
        if cache.width != cache.width_v or cache.width not in coded.WIDTHS:
            return form.widths
        if storage not in HALVES and (of_values is None or kind_of(storage) is not coded):
            return f"V is {cache.v.format or cache.v.array.dtype.name}"
        if 0 in channels.word_bits(cache.k.storage, storage, cache.width_v):
            return f"threads cannot share whole words of {storage} in heads {cache.width_v} wide"
        for scale in cache.scales:
            if scale.array.dtype.short != "f16":
                return f"scales are {scale.array.dtype.name}"
        if reason := form.why_not_begin_at(attend.ROW_BYTES):
            return reason
        nbytes = channels.NUMBER_BYTES
        begin = not any((a.array.ptr or 0) % nbytes or a.array.offset % nbytes for a in cache.scales)
        return "" if begin else f"scales do not begin at a multiple of {nbytes} bytes"

    def words_of(self, form: Form) -> Any:
        return channels.word_bits(form.cache.k.storage, form.cache.v.storage, form.cache.width_v)

    def tile_of(self, form: Form) -> Any:
        return channels.tile_of(form.cache.k.storage, form.cache.v.storage)


def _is_long(form: Form, long: bool) -> bool:
    """Whether the code of a kernel is long, see `attend.tile_of`."""
    return long if form.selects else form.query.queries > 1 and (long or form.cache.kind == "table")


def _why_not_scales(form: Form) -> str:
    """Why the scales of codes cannot be read as they are stored; empty if they can."""
    cache, storage = form.cache, form.cache.k.storage
    scales = [scale.array for scale in cache.scales]
    together = 2 if cache.k.format and cache.k.format.numbers == 2 else 1
    if storage in floats.KINDS:
        together = floats.scales_per_word(storage, cache.width, cache.width_v)
    elif [a.dtype.short for a in scales] != ["f16", "f16"]:
        return f"scales are {scales[0].dtype.name}"
    nbytes = together * scales[0].dtype.itemsize if together > 1 else 1
    begin = form.scales_begin_at(nbytes)
    return "" if begin else f"the scales of a row do not begin at a multiple of {nbytes} bytes"


def _copies_tiles(form: Form) -> bool:
    """Whether warps copy tiles of a cache into shared memory: see `kernels.attention.sm80.copies`."""
    cache = form.cache
    storage, widths = cache.k.storage, (cache.width, cache.width_v)
    if cache.kind != "linear" or form.selects or not copies.blocks_of(storage, *widths):
        return False
    numbers = copies.copied(storage, *widths).numbers
    return not launch.why_no_hopper(form.live) and form.scales_begin_at(min(copies.WORD, numbers))
