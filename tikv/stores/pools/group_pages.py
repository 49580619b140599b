"""TokenGroupPages: a paged store in which older tokens are codes, such as ``dtype=tikv.Quant(axis="tokens")``.

A block holds whole groups of codes. The newest tokens of a sequence, `residual` or `recent` to `group` more of them,
are kept unquantised in pages outside of the pool, with room for four sequences at first and twice as many whenever that
is full. So are its first tokens, `sinks` of them, which never become codes: groups are counted from the token after
them. When a sequence's pages are full, an append first quantises their oldest group into the sequence's block. Forks
share blocks and copy those pages; what both quantise later has the same bits, and a block in which their tokens differ
was copied before.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tikv import dtypes
from tikv.arrays import Array, ArrayView, CacheArray, Host, describe, new_array, new_like, view
from tikv.errors import OptionError, PositionError
from tikv.ops import blocks, checks
from tikv.ops.attention.call import attention_call
from tikv.ops.attention.launches import AttendedTokens
from tikv.ops.attention.mass import Mass, fill
from tikv.ops.attention.merge import merge_into
from tikv.ops.attention.options import MOST_QUERIES
from tikv.ops.attention.paged import check_paged_queries
from tikv.ops.attention.plan import Results
from tikv.ops.attention.request import AttendRequest
from tikv.ops.layouts import POOL_LAYOUTS, Placement, Rows, pool_rows
from tikv.ops.rotate import Rope
from tikv.ops.staging import Staging
from tikv.runtime import Runtime
from tikv.runtime.interrupts import Held, uninterrupted
from tikv.stores.layers.attend import last_queries, results_of
from tikv.stores.layers.coded import coded as coded_of
from tikv.stores.layers.coded_arrays import CodeSlots, ScoreMemory, Weighing
from tikv.stores.layers.coded_tiles import CodedTiles, joined_memory
from tikv.stores.layers.group_compaction import Coded, kept_groups
from tikv.stores.layers.memory import copy_rows, rows_of
from tikv.stores.layers.queries import attend_queries, rows_first, rows_of_queries, with_tokens
from tikv.stores.layers.token_group_form import TokenGroupForm
from tikv.stores.layers.token_groups import REFUSED
from tikv.stores.layers.unkept import UnkeptTokens
from tikv.stores.pools.append import RowWrite, begin_append, check_rows, cumulated
from tikv.stores.pools.blocks import slots_of
from tikv.stores.pools.config import PoolConfig
from tikv.stores.pools.memory import BlockPools, HostBlocks, LayerPools
from tikv.stores.pools.pages import Changing, Pages
from tikv.stores.pools.rows import Moves, of_all_heads, pairs_of
from tikv.stores.pools.sequences import AppendStep, SequenceState, refuse_missed, rewritten_back
from tikv.stores.row_format import ROWS, RowFormats, check_appended

FIRST_SEQUENCES = 4  # the first pages of new tokens are for this many sequences


def take_parts(live: Runtime, arrays: Sequence[ArrayView], each: int, numbers: Host) -> list[ArrayView]:
    """A copy of parts of blocks, `each` per block, by their numbers among the parts of all blocks."""
    copies = []
    for a in arrays:
        rows, of_heads = _as_parts(a, each), of_all_heads(a.shape[1], each, numbers)
        copies.append(new_array((len(of_heads), rows.shape[1]), a.dtype, live))
        blocks.swap_blocks(rows, copies[-1], pairs_of(of_heads, np.arange(len(of_heads))))
    return copies


def put_parts(arrays: Sequence[ArrayView], each: int, copies: Sequence[ArrayView], numbers: Host) -> None:
    """Write what `take_parts` copied to the parts with these numbers."""
    for a, parts in zip(arrays, copies, strict=True):
        of_heads = of_all_heads(a.shape[1], each, numbers)
        blocks.swap_blocks(parts, _as_parts(a, each), pairs_of(np.arange(len(of_heads)), of_heads))


def _moved(parts: Host, src: Sequence[int], dst: Sequence[int], each: int) -> tuple[int, Host, Host]:
    """How many parts a block has, and the numbers from and to which parts move to the front of other blocks."""
    numbers = slots_of(src, parts, each), slots_of(dst, np.arange(len(parts)), each)
    moved = numbers[0] != numbers[1]
    return each, numbers[0][moved], numbers[1][moved]


def _as_parts(a: ArrayView, each: int) -> ArrayView:
    """Blocks (n, heads, ...) as rows of their parts, of which each head of a block has `each`."""
    n = a.shape[0] * a.shape[1] * each
    width = math.prod(a.shape) // n
    return a.restrided((n, width), (width, 1))


class NewPages:
    """Pages of the sinks and of the newest tokens for all layers; the pages of a sequence are adjacent.

    Those of the sinks come first. The others are a ring, of which each group fills as many pages.

    Attributes:
        page: tokens of a page: a group, or what the number of sinks is a multiple of too.
        each: how many pages a sequence has in every layer.
        pools: the pages, which are blocks of a separate pool.
    """

    def __init__(self, config: PoolConfig, form: TokenGroupForm, num_layers: int, live: Runtime) -> None:
        group, sinks = form.quant.group, form.quant.sinks
        self.page = math.gcd(group, sinks)
        self._fixed, self._ring = sinks // self.page, (-(-form.quant.newest // group) + 1) * (group // self.page)
        self.each = self._fixed + self._ring
        rows, self._num_layers, self.runtime = form.newest_rows, num_layers, live
        formats = RowFormats(*rows, config.rows.scale_dtype)
        layout = "HND" if self.page == group else "NHD"  # so that the rows of a group have the same distances
        self._config = dataclasses.replace(config, block_size=self.page, rows=formats, layout=layout, groups=None)
        self._ranks, self._free = dict[int, int](), list(range(FIRST_SEQUENCES))
        self._away: dict[int, HostBlocks] = {}  # pages of swapped-out sequences
        self.pools = self._pools_for(FIRST_SEQUENCES)

    def _pools_for(self, sequences: int) -> LayerPools:
        config = dataclasses.replace(self._config, num_blocks=sequences * self.each)
        return LayerPools(config, self._num_layers, self.runtime)

    def _grow(self, sequences: int) -> None:
        """Allocate memory for `sequences` sequences, and keep what is stored."""
        larger, pages = self._pools_for(sequences), np.arange(len(self._ranks) * self.each)
        for old, new in zip(self.pools.layers, larger.layers, strict=True):
            for a, to in zip(old, new, strict=True):
                blocks.swap_blocks(a, to, pairs_of(pages, pages))
        self.pools = larger
        self._free += range(len(self._ranks), sequences)

    def take(self, seq: int) -> None:
        """Take pages for a sequence."""
        if not self._free:
            self._grow(2 * len(self._ranks))
        self._ranks[seq] = self._free.pop(0)

    def release(self, seq: int) -> None:
        """Give back a sequence's pages, if it has any."""
        rank = self._ranks.pop(seq, None)
        if rank is not None:
            self._free.append(rank)
        self._away.pop(seq, None)

    def swap_out(self, seq: int) -> None:
        """Move its pages to the host."""
        pages = self.read(seq)
        self.release(seq)
        self._away[seq] = pages

    def swap_in(self, seq: int) -> None:
        """The reverse of `swap_out`."""
        self.bring(seq, self._away[seq])
        del self._away[seq]

    def read(self, seq: int) -> HostBlocks:
        """Copies of its pages on the host, wherever they are."""
        return self._away[seq] if seq in self._away else self.pools.read_blocks(self.pages(seq))

    def bring(self, seq: int, host: HostBlocks, swapped: bool = False) -> None:
        """Take pages for a sequence and fill them with what `read` returned, in memory or on the host."""
        if swapped:
            self._away[seq] = host
        else:
            self.take(seq)
            self.pools.write_blocks(host, range(self.each), self.pages(seq))

    def pages(self, seq: int) -> list[int]:
        """The pages of a sequence, in the order of memory."""
        first = self._ranks[seq] * self.each
        return list(range(first, first + self.each))

    def in_order(self, seq: int, coded: int) -> list[int]:
        """The pages of a sequence, `coded` of whose tokens are codes, the oldest page first."""
        pages = self.pages(seq)
        return [pages[i] for i in self._order(coded)]

    def _order(self, coded: int) -> Host:
        """The order in time of the pages of a sequence, `coded` of whose tokens are codes."""
        ring = (np.arange(self._ring) + coded // self.page) % self._ring
        return np.concatenate([np.arange(self._fixed), self._fixed + ring])

    def oldest_group(self, seq: int, layer: int, coded: int) -> list[Rows]:
        """K and V of a sequence's oldest group, `coded` of whose tokens are codes, as rows that follow each other."""
        page = self.in_order(seq, coded)[self._fixed]
        return [a._replace(first=page * a.block, block=0) for a in self.rows_of(layer)]

    def parts(self, layer: int) -> list[ArrayView]:
        """A layer's arrays as `take_parts` reads them: rows of all heads are one part if they lie side by side."""
        arrays = self.pools.layers[layer]
        if self._config.layout == "HND":
            return [*arrays]
        return [a.restrided((a.shape[0], 1, *a.shape[1:]), (a.strides[0], 0, *a.strides[1:])) for a in arrays]

    def rows_of(self, layer: int) -> list[Rows]:
        """K and V of a layer in all pages."""
        return [pool_rows(a, POOL_LAYOUTS[self._config.layout][0]) for a in self.pools.layers[layer]]

    def rows(self, seq: int, coded: Sequence[int]) -> list[list[Host]]:
        """Copies of a sequence's K and V in each layer as rows (n, heads, width), the oldest first.

        `coded` says how many tokens of each layer are codes.
        """
        layers = zip(self.pools.to_rows(self.read(seq)), coded, strict=True)
        return [[a[self._order(n)].reshape(-1, *a.shape[2:]) for a in arrays] for arrays, n in layers]

    def from_rows(self, rows: list[list[Host]], coded: Sequence[int]) -> HostBlocks:
        """The reverse of `rows`, for fewer of them too: pages as `read` returns them."""
        pages = []
        for arrays, n in zip(rows, coded, strict=True):
            pages.append([np.zeros((self.each * self.page, *a.shape[1:]), a.dtype) for a in arrays])
            for to, a in zip(pages[-1], arrays, strict=True):
                to[: len(a)] = a
            behind = np.argsort(self._order(n))
            pages[-1] = [a.reshape(self.each, self.page, *a.shape[1:])[behind] for a in pages[-1]]
        return self.pools.from_rows(pages)

    def copy(self, src: int, dst: int) -> None:
        """Copy the pages of one sequence to another."""
        self.pools.copy_blocks(list(zip(self.pages(src), self.pages(dst), strict=True)))


class TokenGroupPages(Pages[BlockPools]):
    """`Pages` whose older tokens are codes, see the module.

    Attributes:
        new: pages of the sinks and the newest tokens.
        sinks: how many first tokens are never codes.
        coded: how many tokens after them are codes, for each sequence and layer.
    """

    def __init__(self, live: Runtime, config: PoolConfig, num_layers: int) -> None:
        assert config.groups is not None
        super().__init__(live, config, num_layers, BlockPools(config, num_layers, live))
        form = self.form = config.groups
        self.title, self.remedy = f"a pool of {form.named}", f"Use {form.other}."
        self.new, self.coded = NewPages(config, form, num_layers, live), dict[int, list[int]]()
        self.quant, self.sinks, self.scratch = form.quant, form.quant.sinks, ScoreMemory(live)
        self.sequences.outside = self.sinks
        self._codes = [coded_of(self.form.codes, arrays) for arrays in self.pools.layers]
        self._memory_to_encode: Any = self._codes[0].turned(1, 1, self.form.codes.rows, live)

    @property
    def nbytes(self) -> int:
        """Bytes of blocks and of pages of new tokens, filled or not."""
        return self.pools.nbytes + self.new.pools.nbytes

    # --- sequences

    def add(self, token_ids: Any, salt: bytes, leave: int) -> int:
        """As in `Pages`, without token ids."""
        if len(token_ids):
            raise OptionError(
                f"PagedKVCacheStore.add: blocks of {self.title} cannot be found by token_ids, since the newest tokens "
                "of a block may not be codes yet. Leave token_ids out, and use fork()."
            )
        return self._with_pages(self.sequences.add(token_ids, salt, leave), [0] * len(self._codes))

    def _with_pages(self, seq: int, coded: list[int]) -> int:
        self.new.take(seq)
        self.coded[seq] = coded
        return seq

    @uninterrupted
    def fork(self, state: SequenceState) -> int:
        """As in `Pages`; pages of new tokens are copied."""
        seq = self._with_pages(self.sequences.fork(state), list(self.coded[state.number]))
        self.new.copy(state.number, seq)
        return seq

    @uninterrupted
    def truncate(self, operation: str, state: SequenceState, n: int) -> None:
        """As in `Pages`; it drops new tokens or whole groups.

        Raises:
            PositionError: part of a group would be kept. Nothing is changed.
        """
        coded, group, sinks = self.coded[state.number], self.quant.group, self.sinks
        # Of layers that hold so many, the tokens after the sinks.
        lengths = [n - (history.dropped if history else 0) - sinks for history in state.histories]
        for codes, length in zip(coded, lengths, strict=True):
            if 0 < length < codes and length % group:
                after = f" after its {sinks} sinks" if sinks else ""
                raise PositionError(
                    f"{operation}: sequence {state.number} cannot keep {n} tokens: its first {codes}{after} are codes "
                    f"of whole groups, quantised once. Keep at least that many, or a multiple of {group}{after}."
                )
        self.sequences.truncate(state, n)
        self.coded[state.number] = [min(codes, max(0, n)) for codes, n in zip(coded, lengths, strict=True)]

    def refuse_align(self, operation: str, state: SequenceState, n: int) -> None:
        """As in `Pages`; a group that the dropped tokens let become codes does not come back."""
        super().refuse_align(operation, state, n)
        for layer, (coded, end) in enumerate(zip(self.coded[state.number], state.ends, strict=True)):
            now = state.lengths[layer] - self.sinks
            aligned = now - (end - n)
            before, after = (self.form.closed_at(tokens) for tokens in (aligned, now))
            older = aligned < coded or (before < coded == after and not self.form.closes_early)
            if n < end and aligned > 0 and older:
                why = "older tokens became codes when its newest were appended"
                raise state.cannot_align(operation, layer, n, why)

    def refuse_merge(self, operation: str) -> None:
        """As in `Pages`: codes would be quantised a second time."""
        raise OptionError(
            f"{operation}: {self.title} does not merge rows, since those that are codes would be quantised a second "
            f"time, with other scales. Leave merge out, or use {self.form.other}."
        )

    def check_kept(self, operation: str, layer: int, state: SequenceState, indices: Host) -> None:
        """As in `Pages`: a group of codes must be kept as a whole, and no group without the sinks."""
        sinks = min(self.sinks, state.lengths[layer])
        coded = Coded(sinks, sinks + self.coded[state.number][layer], self.quant.group)
        kept_groups(operation, indices[None], coded, lambda row: f"sequence {state.number} in layer {layer}")

    @uninterrupted
    def move(
        self, operation: str, layer: int, state: SequenceState, table: Sequence[int], moves: Moves, rope: Rope | None
    ) -> None:
        """As in `Pages`, groups and new tokens."""
        group, before, indices = self.quant.group, self.coded[state.number][layer], moves.src
        first, end = np.searchsorted(indices, (self.sinks, self.sinks + before)).tolist()
        coded = end - first
        pages, pages_to = (self.new.in_order(state.number, n) for n in (before, coded))
        codes = _moved((indices[first:end:group] - self.sinks) // group, table, table, self.config.block_size // group)
        rows = self._places(np.concatenate([indices[:first], indices[end:]]), before)
        new = _moved(rows, pages, pages_to, self.new.page)
        moved = (self.pools.layers[layer], *codes), (self.new.parts(layer), *new)
        copies = [take_parts(self.runtime, arrays, each, src) for arrays, each, src, _ in moved]
        for (arrays, each, _, dst), parts in zip(moved, copies, strict=True):
            put_parts(arrays, each, parts, dst)
        self.coded[state.number][layer] = coded

    @uninterrupted
    def free(self, seq: int) -> None:
        """As of `Pages`."""
        self.sequences.free(seq)
        self.new.release(seq)
        del self.coded[seq]

    @uninterrupted
    def swap_out(self, state: SequenceState) -> None:
        """As in `Pages`, with the pages of new tokens."""
        self.new.swap_out(state.number)
        self.sequences.swap_out(state, self.pools.read_blocks(state.blocks))

    @uninterrupted
    def write_swapped(self, state: SequenceState, shared: list[int], fresh: list[int]) -> None:
        """As of `Pages`."""
        super().write_swapped(state, shared, fresh)
        self.new.swap_in(state.number)

    # --- files

    def written(self, state: SequenceState) -> list[int]:
        """As in `Pages`: the tokens that are codes."""
        return self.coded[state.number]

    def beside(self, states: Sequence[SequenceState]) -> tuple[dict[str, Host], list[dict[str, Any]]]:
        """As in `Pages`: the sinks and the newest tokens as rows (n, heads, width), one sequence after the other."""
        metadata = [{"coded": self.coded[state.number]} for state in states]
        parts = {
            f"new.{i}.{name}": [np.empty((0, self.config.num_kv_heads, row.width), row.stored.numpy)]
            for i in range(len(self._codes))
            for name, row in zip(ROWS, self.form.newest_rows, strict=True)
        }
        for state in states:
            coded = self.coded[state.number]
            for i, newest in enumerate(self.new.rows(state.number, coded)):
                for name, rows in zip(ROWS, newest, strict=True):
                    parts[f"new.{i}.{name}"].append(rows[: state.lengths[i] - coded[i]])
        return {name: np.concatenate(pieces) for name, pieces in parts.items()}, metadata

    @uninterrupted
    def bring(self, numbers: Sequence[int], tensors: dict[str, Host], metadata: Sequence[dict[str, Any]]) -> None:
        """As of `Pages`."""
        first = np.zeros(len(self._codes), int)  # of each layer, the rows of the sequences before
        try:
            for number, one in zip(numbers, metadata, strict=True):
                coded = self.coded[number] = list(one["coded"])
                end = first + one["lengths"] - coded
                rows = [
                    [tensors[f"new.{i}.{x}"][a:b] for x in ROWS]
                    for i, (a, b) in enumerate(zip(first, end, strict=True))
                ]
                self.new.bring(number, self.new.from_rows(rows, coded), one["swapped"])
                first = end
        except BaseException:
            for number in numbers:
                self.new.release(number)
                self.coded.pop(number, None)
            raise

    # --- writes

    @uninterrupted
    def append(
        self,
        operation: str,
        layer: int,
        rows: Sequence[ArrayView],
        seqs: Array,
        cu_seqlens: Array,
        layout: str,
        part: bool = False,
    ) -> AppendStep:
        """As in `Pages`: one launch for tokens that the new pages have room for, and three for each group.

        `part` is as in `Sequences.begin`.
        """
        check_rows(operation, self.config, rows, layout)
        rows = [rows_first(a, layout) for a in rows]
        slots = np.full(rows[0].shape[0], -1, np.int32)
        self._write(operation, layer, rows)
        step = begin_append(self, operation, layer, seqs, cu_seqlens, rows[0].shape[0], part)
        with Changing(self, step) as change:
            change.copy_shared()
            for i, state in enumerate(step.states):
                if step.cu_seqlens[i] < step.cu_seqlens[i + 1]:
                    self._close(operation, layer, state, step.tables[i])
            done = [0] * len(step.states)
            while self._find_slots(operation, layer, step, done, slots):
                index = self.tables.upload(f"slots of {len(slots)}", slots)
                for call in self._write(operation, layer, rows).calls(rows, index):
                    call.run()
                slots[:] = -1
        self.sequences.commit(layer, step)
        return step

    def _find_slots(self, operation: str, layer: int, step: AppendStep, done: list[int], slots: Host) -> bool:
        """Find slots for each sequence's next rows, after quantising a group if there is no room; False if none."""
        page, any_rows, most = self.new.page, False, self.sinks + self.form.slots
        for i, state in enumerate(step.states):
            first, end = step.cu_seqlens[i] + done[i], step.cu_seqlens[i + 1]
            if first == end:
                continue
            coded, length = self.coded[state.number], step.starts[i] + done[i]
            if length - coded[layer] >= most:
                self._encode(operation, layer, state.number, step.tables[i])
            count = min(end - first, most - (length - coded[layer]))
            indices = np.arange(count) + length - coded[layer]
            slots[first : first + count] = slots_of(self.new.in_order(state.number, coded[layer]), indices, page)
            done[i] += count
            any_rows = True
        return any_rows

    def _write(self, operation: str, layer: int, rows: Sequence[ArrayView]) -> RowWrite:
        """The checked write of rows (T, H, D) to slots of the new pages; DTypeError if these do not take them."""
        key = (layer, *[a.key for a in rows])
        write: RowWrite | None = self.new.pools.writes.get(key)
        if write is None:
            newest, k = self.new.pools.config.rows, rows[0]
            into = [row.stored.name for row in newest.both]
            takes = [d.name for d in dtypes.QUANTIZABLE if all(to in dtypes.CONVERSIONS[d.name] for to in into)]
            if k.dtype is rows[1].dtype:
                check_appended(operation, k, takes, f"{self.title}, whose newest rows are {newest.name}")
            write = self.new.pools.writes.keep(key, RowWrite(operation, self.new.pools, layer, rows))
        return write

    def _close(self, operation: str, layer: int, state: SequenceState, table: Sequence[int]) -> None:
        """Let the groups of a sequence that earlier calls filled become codes, if the form says so."""
        coded = self.coded[state.number]
        while self.form.closes_early and state.lengths[layer] - self.sinks - coded[layer] >= self.quant.group:
            self._encode(operation, layer, state.number, table)

    def _encode(self, operation: str, layer: int, seq: int, table: Sequence[int]) -> None:
        """Quantise the next group of a sequence."""
        at, size = self.coded[seq][layer], self.config.block_size
        k, v = self.new.oldest_group(seq, layer, at)
        self._codes[layer].encode(self.runtime, operation, (k, v), self._memory_to_encode, at % size, table[at // size])
        self.coded[seq][layer] = at + self.quant.group

    def _places(self, indices: Host, coded: int) -> Host:
        """The places of tokens that are not codes among all such tokens of their sequence."""
        return np.where(indices < self.sinks, indices, indices - coded)

    # --- reads

    def tokens(self, operation: str, layer: int, state: SequenceState) -> tuple[CacheArray, CacheArray]:
        """As in `Pages`; keys are float32."""
        live, sinks, heads = self.runtime, self.sinks, self.config.num_kv_heads
        length, coded, size = state.lengths[layer], self.coded[state.number][layer], self.config.block_size
        out = [new_array((length, heads, row.width), row.read_dtype, live) for row in self.config.rows.both]

        def to(position: int) -> list[Rows]:
            return [Rows(a, head=a.strides[1], token=a.strides[0], first=position * a.strides[0]) for a in out]

        for at, block in zip(range(0, coded, size), state.blocks, strict=False):
            k, v = to(sinks + at)
            self._codes[layer].decode(live, operation, range(min(size, coded - at)), (k, v), 1, block)
        self._copy_new(operation, layer, state, to)
        return CacheArray(out[0], live), CacheArray(out[1], live)

    def _copy_new(self, operation: str, layer: int, state: SequenceState, to: Callable[[int], Sequence[Rows]]) -> None:
        """Copy the tokens of a sequence that are not codes to where `to` says, by their place in the sequence."""
        length, coded = state.lengths[layer], self.coded[state.number][layer]
        pages = self.tables.upload("pages read", np.array(self.new.in_order(state.number, coded), np.int32))
        fixed, heads = min(self.sinks, length), self.config.num_kv_heads
        for at, count, first in ((0, fixed, 0), (fixed + coded, length - fixed - coded, fixed)):
            if count:
                rows, limit = self.new.rows_of(layer), self.new.pools.config.num_blocks
                place = Placement("table", self.new.page, pages, position=first, step=1, limit=limit)
                copy_rows(self.runtime, operation, rows, to(at), self.config.rows.widths, (1, heads, count), place)

    def rewrite(
        self, operation: str, layer: int, state: SequenceState, start: int, rows: Sequence[ArrayView], layout: str
    ) -> None:
        """As in `Pages`, for tokens that are not codes yet."""
        check_rows(operation, self.config, rows, layout)
        rows = [rows_first(a, layout) for a in rows]
        tokens, coded = rows[0].shape[0], self.coded[state.number][layer]
        first = state.lengths[layer] - rewritten_back(operation, layer, state, start, tokens)
        if coded and first < self.sinks + coded and first + tokens > self.sinks:
            oldest = start + self.sinks + coded - first
            raise PositionError(
                f"{operation}: position {start} of sequence {state.number} cannot be rewritten: tokens before {oldest} "
                f"are codes, quantised once. Rewrite tokens from {oldest} on."
            )
        pages = self.new.in_order(state.number, coded)
        slots = slots_of(pages, self._places(first + np.arange(tokens), coded), self.new.page).astype(np.int32)
        for call in self._write(operation, layer, rows).calls(rows, self.tables.upload(f"rewritten {layer}", slots)):
            call.run()

    def attend(self, operation: str, layer: int, q: Array, seqs: Array, request: AttendRequest) -> Any:
        """As in `Pages`; codes and new pages are read in place."""
        live, config, ids = self.runtime, self.config, self.ids(seqs, operation)
        self._refuse_options(operation, request)
        states = [self.sequences.state(seq, operation) for seq in ids]
        if not request.return_lse and 0 in [state.lengths[layer] for state in states]:
            refuse_missed(operation, layer, states)
        sizes = len(ids), config.num_kv_heads, config.rows.k.width
        q_view = view(q, "q", operation)
        queries = attend_queries(operation, q_view, request.layout, *sizes, live)
        if request.as_block(operation, queries.tokens):
            request = request._replace(causal=False)
        for state in states:
            coded = self.coded[state.number][layer]
            new = state.lengths[layer] - (self.sinks + coded if coded else 0)
            state.check_queries(operation, layer, queries.tokens, request)
            if queries.tokens > max(1, new):
                raise PositionError(
                    f"{operation}: {queries.tokens} queries are given, but only the newest {new} tokens of sequence "
                    f"{state.number} are not codes yet. Attend with at most that many, or use extend(), which "
                    "attends as it appends."
                )
        mass, to_mass = request.asked_mass(operation), None
        if mass:
            shape = len(ids), config.num_kv_heads, max([state.lengths[layer] for state in states], default=0)
            to_mass = mass.array(operation, q, shape, live, {"q": q_view})
        result, lse = queries.new_out(q, config.rows.v.width, live), queries.new_lse(q, live)
        to = with_tokens(queries.as_read(view(result, "out", operation)), 4)
        to_lse = with_tokens(queries.as_read(view(lse, "lse", operation)), 3)
        asked = with_tokens(queries.as_read(q_view), 4)
        self._attend(operation, layer, asked, states, request, Results(to, True, to_lse))
        if mass:
            mass.start(to_mass)
            arrays = asked, to_lse, view(to_mass, "mass", operation)
            for i, state in enumerate(states):
                one, lse_of, weights = (a.part(0, i, i + 1) for a in arrays)
                self._weigh(operation, layer, one, lse_of, weights, mass, state, request)
        return results_of(result, lse if request.return_lse else None, to_mass)

    @uninterrupted
    def _extend_tiles(
        self, operation: str, layer: int, like: Any, asking: ArrayView, rows: Sequence[ArrayView], seqs: Array,
        cu_seqlens: Array, request: AttendRequest,
    ) -> Any:  # fmt: skip
        """`extend` of tiles: queries see the new tokens unquantised; then these are appended."""
        results = self._extend_unkept(operation, layer, like, asking, rows, seqs, cu_seqlens, request)
        self.append(operation, layer, rows, seqs, cu_seqlens, "token_major")
        return results

    def _extend_unkept(
        self, operation: str, layer: int, like: Any, asking: ArrayView, rows: Sequence[ArrayView], seqs: Array,
        cu_seqlens: Array, request: AttendRequest,
    ) -> Any:  # fmt: skip
        """`extend` with ``keep=False``, or of tiles without the append, sequence by sequence."""
        live, config, ids = self.runtime, self.config, self.ids(seqs, operation)
        states = [self.sequences.state(seq, operation) for seq in ids]
        bounds = cumulated(cu_seqlens, len(ids), rows[0].shape[0], operation, live)
        mass, to_mass = request.asked_mass(operation), None
        if mass:
            ends = bounds[1:] if request.keep else bounds
            held = [state.lengths[layer] + b - a for state, a, b in zip(states, bounds, ends, strict=False)]
            shape = len(ids), config.num_kv_heads, max(held, default=0)
            others = {"q": asking, "k": rows[0], "v": rows[1]}
            to_mass = mass.array(operation, like, shape, live, others)
        lead = asking.shape[:2] if request.layout == "token_major" else asking.shape[1::-1]
        result = new_like(like, (*lead, config.rows.v.width), asking.dtype, live, zeroed=True)
        sums = new_like(like, lead, dtypes.float32, live)
        fill(sums, -np.inf)
        mass.start(to_mass)
        views = [rows_first(view(a, "results", operation), request.layout) for a in (result, sums)]
        stage = Staging(live, [asking, *rows, *views], [False] * 3 + [True] * 2)
        for i, state in enumerate(states):
            tokens = bounds[i + 1] - bounds[i]
            if tokens:
                if request.keep:
                    self._close(operation, layer, state, state.blocks)
                q, k, v, out, lse = (_of_one(a.part(0, *bounds[i : i + 2])) for a in stage.arrays)
                terms = request.terms.views(operation)
                new = UnkeptTokens(live, operation, k, v, request.scores, terms)
                whole = self._joined(operation, layer, state, q, new)
                if whole is None:
                    new.attend(q, out, lse, functools.partial(self._over_held, operation, layer, state, request))
                else:
                    whole.attend(q, out, lse)
                if mass:
                    weights = view(to_mass, "mass", operation).part(0, i, i + 1)
                    length = state.lengths[layer]
                    if length:
                        self._weigh(operation, layer, q, lse, weights, mass, state, request, tokens)
                    if request.keep:
                        asked = last_queries(q, lse, mass.queries)
                        new.weigh(*asked, weights.part(2, 0, length + tokens), mass.kind)
        stage.finish()
        return results_of(result, sums if request.return_lse else None, to_mass)

    def _joined(
        self, operation: str, layer: int, state: SequenceState, q: ArrayView, new: UnkeptTokens
    ) -> UnkeptTokens | None:
        """All that queries of new tokens attend over, tiles decoded once, as one array; None if parts are merged."""
        held, coded, codes = state.lengths[layer], self.coded[state.number][layer], self._codes[layer]
        if not held:
            return new
        if not isinstance(codes, CodedTiles):
            return None
        memory = joined_memory(codes.form, q, (new.k, new.v), held + q.shape[2], self.scratch)
        if memory is None:
            return None
        if coded:
            table = np.array([state.blocks[: -(-coded // self.config.block_size)]], np.int32)
            to = rows_of(memory[0], self.sinks), rows_of(memory[1], self.sinks)
            codes.decode_blocks(self.runtime, operation, coded, to, self.tables.upload(f"joined blocks {layer}", table))
        self._copy_new(operation, layer, state, lambda at: [rows_of(a, at) for a in memory])
        return new.behind(held, memory, 0)

    def _over_held(
        self, operation: str, layer: int, state: SequenceState, request: AttendRequest, q: ArrayView, ahead: int,
        terms: Any, to: Results,
    ) -> Any:  # fmt: skip
        """Attention of queries that are `ahead` of what a sequence holds; None if it holds nothing."""
        if not state.lengths[layer]:
            return None
        self._attend(operation, layer, q, [state], request, to, ahead)
        return to.out, to.lse

    def _weigh(
        self, operation: str, layer: int, q: ArrayView, lse: ArrayView, to: ArrayView, mass: Mass, state: SequenceState,
        request: AttendRequest, ahead: int = 0,
    ) -> None:  # fmt: skip
        """Add the mass that (1, Hq, T, D) queries of a sequence's newest tokens give its tokens to `to`."""
        among, (q, lse) = q.shape[2], last_queries(q, lse, mass.queries)
        coded, length, size = self.coded[state.number][layer], state.lengths[layer], self.config.block_size
        pages = np.array([self.new.in_order(state.number, coded)], np.int32)
        caches = self.new.pools.caches[layer]._replace(
            table=self.tables.upload(f"weighed new pages {layer}", pages), lens=length - coded
        )
        plain = AttendRequest(scale=request.scale, softcap=request.softcap, causal=request.causal, short=True)
        call = attention_call(operation, q, caches, plain)
        sinks = self.sinks if coded else 0
        for first, end, between in ((0, sinks, 0), (sinks, call.length, coded)):
            tokens = AttendedTokens(end, first, call.length - end + ahead)
            call.plan.weigh(dict(call.arrays), lse, to.part(2, first + between, end + between), tokens, mass.kind)
        if coded:
            blocks_of = np.array([state.blocks[: -(-length // size)]], np.int32)
            slots = CodeSlots(
                coded // self.quant.group, blocks_of.shape[1] * size, page=size, blocks=self.config.num_blocks,
                tokens=AttendedTokens(coded), known=[(state.blocks, coded)],
                paged={"table": self.tables.upload(f"weighed blocks {layer}", blocks_of)},
            )  # fmt: skip
            weighing = Weighing(among, lse, to.part(2, sinks, sinks + coded), mass.kind)
            self._codes[layer].weigh(operation, q, weighing, request.scores, slots, self.scratch)

    def _refuse_options(self, operation: str, request: AttendRequest) -> None:
        title, remedy = f"{self.title} does not support", f"Leave it out, or use {self.form.other}."
        request.refuse(operation, (*REFUSED, "window"), title, remedy)
        request.check_choices(operation, ("auto", "taichi"))

    def _attend(
        self, operation: str, layer: int, q: ArrayView, states: Sequence[SequenceState], request: AttendRequest,
        to: Results, ahead: int = 0,
    ) -> None:  # fmt: skip
        """Attention of (B, Hq, T, D) queries of the newest tokens of sequences, or of tokens that are `ahead`."""
        size, codes = self.config.block_size, self._codes[layer]
        coded = np.array([self.coded[state.number][layer] for state in states], np.int32)
        lens = np.array([state.lengths[layer] for state in states], np.int32) - coded
        order = [self.new.in_order(state.number, int(n)) for state, n in zip(states, coded, strict=True)]
        pages = np.array(order, np.int32).reshape(len(states), self.new.each)
        caches = self.new.pools.caches[layer]._replace(
            table=self.tables.upload(f"new pages {layer}", pages),
            lens=self.tables.known(f"new tokens {layer}", lens),
        )
        call = attention_call(operation, q, caches, request._replace(short=True))
        tokens = AttendedTokens(call.length, ahead=ahead)
        if not coded.any():
            call.plan.attend(None, dict(call.arrays), tokens, to)
            return
        part = self.scratch.partial("of the newest", to.out.shape)
        newest = call.plan.attend(None, dict(call.arrays), tokens, part)
        table = self.tables.block_tables(layer, self.sequences, tuple(s.number for s in states), states)[0]
        slots = CodeSlots(
            int(coded.max()) // self.quant.group, table.shape[1] * size, page=size, blocks=self.config.num_blocks,
            paged={"table": table, "lens": self.tables.known(f"coded {layer}", coded)},
            known=[(state.blocks, int(n)) for state, n in zip(states, coded, strict=True)],
        )  # fmt: skip
        older = codes.attend(operation, q, request.scores, slots, self.scratch)
        merge_into(operation, (*newest, *older), False, to.out, to.lse)

    def extend(
        self, operation: str, layer: int, arrays: tuple[Any, Any, Any], seqs: Array, cu_seqlens: Array,
        request: AttendRequest,
    ) -> Any:  # fmt: skip
        """As in `Pages`, a few tokens at a time: each query sees what it would see if it came alone."""
        live, config, quant, most = self.runtime, self.config, self.quant, self.sinks + self.form.slots
        self._refuse_options(operation, request)
        if request.block is not None:
            title, remedy = f"{self.title} does not support", "Append the tokens, and attend with block=."
            request.refuse(operation, ("block",), title, remedy)
        q, *kv = (view(a, name, operation) for a, name in zip(arrays, "qkv", strict=True))
        check_rows(operation, config, kv, request.layout)
        rows = [rows_first(a, request.layout) for a in kv]
        asking = rows_of_queries(operation, q, request.layout, config.num_kv_heads, config.rows.k.width, live)
        detail = f"k: {describe(kv[0])}"
        checks.extent(asking.shape[0], rows[0].shape[0], "the number of rows of q", operation, detail)
        terms = request.terms.views(operation)
        check_paged_queries(operation, _of_one(asking), self.new.pools.caches[layer], request, terms, None)
        if not request.keep:
            return self._extend_unkept(operation, layer, arrays[0], asking, rows, seqs, cu_seqlens, request)
        step = begin_append(
            self, operation, layer, seqs, cu_seqlens, rows[0].shape[0]
        )  # checks that there is room for all
        if not step.committed:
            self.sequences.undo(step, refused=True)
        if self.form.closes_early:
            return self._extend_tiles(operation, layer, arrays[0], asking, rows, seqs, cu_seqlens, request)
        tokens, q_heads, padded = rows[0].shape[0], asking.shape[1], step.cu_seqlens[-1] < rows[0].shape[0]
        lead = (tokens, q_heads) if request.layout == "token_major" else (q_heads, tokens)
        result = new_like(arrays[0], (*lead, config.rows.v.width), asking.dtype, live, zeroed=padded)
        sums = new_like(arrays[0], lead, dtypes.float32, live)
        if padded:
            fill(sums, -np.inf)
        to, to_lse = (rows_first(view(a, "out", operation), request.layout) for a in (result, sums))
        before = [state.lengths[layer] for state in step.states]
        mass, to_mass = request.asked_mass(operation), None
        if mass:
            ends = np.array(before) + np.diff(step.cu_seqlens)
            shape = len(ends), config.num_kv_heads, int(np.max(ends, initial=0))
            to_mass = mass.array(operation, arrays[0], shape, live, {"q": asking, "k": rows[0], "v": rows[1]})
            mass.start(to_mass)
        try:
            for i, state in enumerate(step.states):
                first, end = step.cu_seqlens[i], step.cu_seqlens[i + 1]
                weighed = end if not mass else first if mass.queries is None else max(first, end - mass.queries)
                while first < end:
                    free = most - (state.lengths[layer] - self.coded[state.number][layer])
                    count = min(end - first, free or quant.group, MOST_QUERIES)
                    next_rows = [a.part(0, first, first + count) for a in rows]
                    self.append(operation, layer, next_rows, [state.number], [0, count], "token_major", part=True)
                    part, out, lse = (_of_one(a.part(0, first, first + count)) for a in (asking, to, to_lse))
                    self._attend(operation, layer, part, [state], request, Results(out, True, lse))
                    if weighed < first + count:
                        of_part = mass._replace(queries=count - max(0, weighed - first))
                        weights = view(to_mass, "mass", operation).part(0, i, i + 1)
                        self._weigh(operation, layer, part, lse, weights, of_part, state, request)
                    first += count
        except BaseException as error:
            with Held():
                lengths = {state.number: state.lengths[layer] for state in step.states}
                if before != [*lengths.values()]:
                    said = str(error) or f"{operation} was interrupted."
                    error.args = (
                        f"{said} Some of the new tokens were appended, since older ones had to become codes first: "
                        f"layer {layer} now holds {lengths} tokens of each sequence.",
                    )
            raise
        return results_of(result, sums if request.return_lse else None, to_mass)


def _of_one(a: ArrayView) -> ArrayView:
    """Rows (T, heads, ...) of one sequence as (1, heads, T, ...)."""
    (tokens, heads, *rest), (token, head, *inner) = a.shape, a.strides
    return a.restrided((1, heads, tokens, *rest), (0, head, token, *inner))
