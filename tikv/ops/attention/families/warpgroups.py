"""Attention in warpgroups of compute capability 9.0, for prompts and latents: they need the native launcher."""

from __future__ import annotations

import math
from typing import Any

from tikv import launch
from tikv.formats import OF_CODE
from tikv.kernels.attention.parameters import MAX_TOKENS
from tikv.kernels.attention.sm80 import halves
from tikv.kernels.attention.sm80.instructions import HALVES
from tikv.kernels.attention.sm90 import attend, coded, eight, latents, merge
from tikv.ops.attention.families.form import Form
from tikv.ops.attention.families.tensor_cores import SUM_ORDER, TensorRows, Tiles
from tikv.ops.attention.invariance import queries_of_launch
from tikv.ops.attention.options import MOST_WARPGROUP_QUERIES
from tikv.ops.attention.splits import Lengths, Shares, fewest_splits
from tikv.ops.attention.terms import tree_of

NEEDS = "compute capability 9.0 and the native launcher"
LEAST_FILLED = 0.8  # of the processors, in all waves of tasks, where a task has all keys
MOST_IN_ORDER = 128  # columns of heads under `invariant`
LEAST_ROWS = 128  # query rows per KV head: fewer would leave part of a block idle


class InWarpgroups(Tiles):
    """What prompts and latents have in common: blocks of a warpgroup that copies, and others that multiply."""

    most_queries = MOST_WARPGROUP_QUERIES  # blocks read only what they see
    in_warpgroups = True

    def __init__(self, form: Form) -> None:
        super().__init__(form)
        self.threads = self.tile.threads

    @classmethod
    def needs_native(cls, form: Form) -> bool:
        return True


class WarpgroupPrompts(InWarpgroups):
    """Prompts of many query rows per KV head, over K and V of equal widths, on compute capability 9.0."""

    title = "warpgroups over prompts"
    serves = (
        f"with {NEEDS}: prompts of at least {LEAST_ROWS} query rows per KV head; K and V of float16, "
        "bfloat16, int8, 8-bit floats or groups of 8 or 4 bits; heads of "
        f"{', '.join(map(str, attend.KEYS_OF))} columns; with `invariant=True` any number of query rows, of at most "
        f"{MOST_IN_ORDER} columns, but no terms such as sink logits"
    )

    @classmethod
    def why_not(cls, form: Form) -> str:
        query, cache, arrays, options = form.query, form.cache, form.arrays, form.options
        if reason := launch.why_no_warpgroups(form.live):
            return reason
        if reason := TensorRows.why_no_products(form) if cache.k.storage in HALVES else _why_not_codes(form):
            return reason
        if form.live.invariant and form.why_not_terms:  # for one query too
            return f"tikv.init(invariant=True) is set, and {form.why_not_terms}"
        if form.selects and not form.live.invariant:
            return "each query chooses its own tokens"
        if cache.width != cache.width_v or cache.width not in attend.KEYS_OF:
            return form.widths
        if form.live.invariant and cache.width > MOST_IN_ORDER:
            return (
                f"heads of more than {MOST_IN_ORDER} columns are left to other kernels under tikv.init(invariant=True)"
            )
        if form.live.invariant:
            pass  # one kernel for prompts and single tokens
        elif query.queries == 1 or query.queries * form.group < LEAST_ROWS:
            return f"a KV head has {query.queries * form.group} query rows"
        if reason := form.why_not_queries(attend.PIECE):
            return reason
        if options.scale is not None and not 0 < options.scale < math.inf:
            return f"scores are scaled by {options.scale}"
        if "alibi_slopes" in arrays and options.sharded[0]:
            return "alibi_slopes count tokens of other ranks"
        if "alibi_slopes" in arrays and (tree := tree_of(arrays)) and options.softcap is not None:
            return f"alibi_slopes and {tree} are given with softcap, which has not been tested on such a GPU yet"
        return ""

    def __init__(self, form: Form) -> None:
        super().__init__(form)
        if self.live.invariant and not self.selects:  # one kernel for any number of rows up to these
            self.rows = self.tile.rows

    def words_of(self, form: Form) -> Any:
        storage = form.cache.k.storage
        bits = halves.WORD_BITS if storage in HALVES else coded.word_bits(storage)
        return bits, bits

    def tile_of(self, form: Form) -> Any:
        producers = attend.producers_of(form.cache.k.storage not in HALVES, form.cache.width)
        if form.live.invariant and form.rows <= attend.ROWS_OF_ONE:
            return attend.Warpgroups(attend.ROWS_OF_ONE, producers=producers, consumers=1)
        return attend.Warpgroups(producers=producers)

    def attend_kernel(self, choices: Any, workers: int, paired: bool) -> tuple[Any, tuple[Any, ...]]:
        factory = attend.make_attend_hopper_in_order if self.live.invariant else attend.make_attend_hopper
        return factory, (self.tile._replace(paired=paired),)

    def shares(self, lengths: Lengths) -> Shares:
        """As in `Family`; but under `invariant` tasks that fill the device merge their parts themselves.

        Over codes, where they have no room for that, they compute several parts in turn.
        """
        shares, mean = super().shares(lengths), lengths.mean or lengths.longest
        if not self.live.invariant:
            return shares
        if self._merges_parts() and 2 * mean > lengths.longest:
            return shares._replace(splits=1, least_share=shares.split_keys, split_keys=MAX_TOKENS)
        if self.cache.k.storage in HALVES:
            return shares
        queries = queries_of_launch(self.live, self.query, shares.splits, self.cache.width_v, False)
        tasks = self.query.batch * self.cache.heads * self.row_blocks(queries)
        groups = fewest_splits(tasks, shares.splits, launch.multiprocessors(self.live), self.tile.resident, 1)
        in_turn = -(-shares.splits // groups)
        return shares._replace(in_turn=in_turn, least_share=in_turn * shares.split_keys)

    def _merges_parts(self) -> bool:
        """Whether tasks merge their parts: there is room, and the last wave of them leaves few processors idle."""
        storage, processors = self.cache.k.storage, launch.multiprocessors(self.live)
        bits = 0 if storage in HALVES else OF_CODE[storage].bits
        waves = -(-self.tasks // processors)
        full = self.tasks >= LEAST_FILLED * waves * processors
        return full and self.cache.sinks == 0 and attend.merges(self.tile.rows, self.cache.width, bits)

    @property
    def merge_kernel(self) -> Any:
        return merge.make_merge_in_passing if self.live.invariant else super().merge_kernel

    @property
    def merge_threads(self) -> int:
        return merge.LANES if self.live.invariant else super().merge_threads


class WarpgroupCodes(WarpgroupPrompts):
    """The same prompts over codes of 8 bits that are multiplied as they are stored, if the user allows it."""

    title = "warpgroups over prompts in 8 bits"
    serves = (
        f"with {NEEDS}, with `attention_bits=8`: prompts as below over K and V of int8 or float8_e4m3fn, "
        f"whose rows begin at multiples of {attend.PIECE} bytes; without `invariant=True`"
    )
    eight = True

    @classmethod
    def why_not(cls, form: Form) -> str:
        storage = form.cache.k.storage
        if form.live.attention_bits != 8:
            return "tikv.init(attention_bits=8) is not set"
        if form.live.invariant:
            return SUM_ORDER
        if storage not in eight.OPERANDS:
            return f"K and V are {form.stored}"
        return super().why_not(form) or form.why_not_begin_at(attend.PIECE)


class WarpgroupLatents(InWarpgroups):
    """Latent attention on compute capability 9.0: values are the first columns of wide keys."""

    title = "warpgroups over latents"
    serves = (
        f"with {NEEDS}: keys of {latents.WIDTH} columns in float16 or bfloat16, whose first "
        f"{latents.WIDTH_V} columns are the values; no sink logits, slopes, masks or trees; without `invariant=True`"
    )

    factory = staticmethod(latents.make_attend_latents)

    @classmethod
    def why_not(cls, form: Form) -> str:
        if form.live.invariant:
            return SUM_ORDER
        if reason := launch.why_no_warpgroups(form.live):
            return reason
        if not form.cache.in_keys:
            return "the values are an array of their own"
        if reason := TensorRows.why_not(form):
            return reason
        if (form.cache.width, form.cache.width_v) != (latents.WIDTH, latents.WIDTH_V):
            return form.widths
        return form.why_not_queries(attend.PIECE)

    def words_of(self, form: Form) -> tuple[int, int]:
        return halves.WORD_BITS, halves.WORD_BITS

    def tile_of(self, form: Form) -> Any:
        return latents.tile_of(form.group, 1 if form.selects else form.query.queries)


def _why_not_codes(form: Form) -> str:
    """Why warpgroups cannot read K and V of other types than float16 and bfloat16; empty if they can."""
    q, storage = form.arrays["q"].dtype, form.cache.k.storage
    if not form.cache.alike or coded.codes_of(storage, form.cache.width, True) is None:
        return f"K and V are {form.stored}"
    if q.short not in HALVES:
        return f"q is {q.name}, over codes"
    return form.why_not_pieces or form.why_not_begin_at(attend.PIECE)
