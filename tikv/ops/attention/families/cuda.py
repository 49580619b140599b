"""Attention on CUDA in float32, without tensor cores; and what all families on CUDA have in common."""

from __future__ import annotations

from typing import Any

from tikv import launch
from tikv.kernels import lanes
from tikv.kernels.attention.cuda import attend, mass
from tikv.kernels.attention.spirv import attend as blocks
from tikv.kernels.codec import FLOAT8
from tikv.kernels.groups import UNIT
from tikv.ops.attention.families.family import Family, MassKernel, most_splits
from tikv.ops.attention.families.form import Form
from tikv.ops.attention.options import MOST_SPLITS
from tikv.ops.attention.splits import EVEN_KEYS, GPU_BLOCKS, LEAST_KEYS, MOST_BLOCKS, Shares, whole_waves


class Cuda(Family):
    """What the families on CUDA have in common: how keys are shared out among blocks, and how masses are computed."""

    def shares_of_heads(self, mean: int, longest: int) -> Shares:
        """As in `Family`: a task has as many keys of a short head as of a long one, as if all had the mean length."""
        share = max(LEAST_KEYS, -(-mean // self.splits_of(mean)), -(-longest // MOST_SPLITS))
        share = max(share, longest * self.tasks // (MOST_BLOCKS * GPU_BLOCKS[self.live.arch]))
        share = -(-share // EVEN_KEYS) * EVEN_KEYS
        return Shares(max(1, -(-longest // share)), self.workers(mean), share)

    def splits_of(self, keys: int) -> int:
        """As in `Family`, in whole waves of blocks."""
        least = super().splits_of(keys)
        return whole_waves(self.tasks, least, most_splits(keys), launch.multiprocessors(self.live))

    def mass_kernel(self, choices: Any, workers: int, by_slot: bool, greatest: bool) -> MassKernel:
        if choices.bits != attend.WORD_BITS or choices.index_bits:
            return super().mass_kernel(choices, workers, by_slot, greatest)
        # V's words are not held, which leaves registers for one more block.
        shape = attend.shape_of(self.cache.width, choices.unit, choices.rows, attend.is_long(choices))
        shape = shape._replace(resident=4)
        single = self.query.queries * self.group <= choices.rows
        return MassKernel(mass.make_mass_lanes, (shape, single, by_slot, greatest), selects=False)

    @property
    def merge_threads(self) -> int:
        """As in `Family`; a block for a row, unless the parts are merged in order."""
        return self.cache.width_v if self.live.invariant else self.mass_threads


class CudaLanes(Cuda):
    """Kernels whose threads read words of 64 bits; lanes share a key: see `kernels.attention.cuda.attend`."""

    title = "lanes that share a key"
    serves = (
        "K and V of the same dtype, int8 and 8-bit floats included; heads at most "
        f"{attend.MAX_WIDTH} wide; without `invariant=True`"
    )

    @classmethod
    def why_not(cls, form: Form) -> str:
        if form.live.invariant:
            return "tikv.init(invariant=True) is set, and the rows of a warp update their maxima together"
        cache = form.cache
        if cache.k.format is not None or not cache.alike:
            return f"K and V are {form.stored} and {cache.v.format or cache.v.array.dtype.name}"
        if max(cache.width, cache.width_v) > attend.MAX_WIDTH:
            return form.widths
        if cache.v.inner[0]:
            return "rows of V are stored in several pieces"
        return form.why_not_begin_at(attend.WORD_BITS // 8)

    def words_of(self, form: Form) -> tuple[int, int]:
        return attend.WORD_BITS, attend.WORD_BITS

    def attend_kernel(self, choices: Any, workers: int, paired: bool) -> tuple[Any, tuple[Any, ...]]:
        width = max(self.cache.width, self.cache.width_v)
        return attend.make_attend_lanes, (attend.shape_of(width, choices.unit, choices.rows, attend.is_long(choices)),)


class CudaBlocks(Cuda):
    """Kernels of blocks whose warps share the keys, which serve all but keys by channel: see `spirv.attend`."""

    title = "warps that share the keys"
    serves = "all calls, except over keys by channel"

    def most_rows_of(self, form: Form) -> int:
        """As in `Family`: fewer if the code would become too long."""
        cache, names = form.cache, ("sink_logits", "alibi_slopes")
        unit, parts = 1, {name for name in names if name in form.arrays}
        for name, rows, bits in zip("kv", (cache.k, cache.v), self.word_bits, strict=True):
            dtype = form.arrays[name].dtype
            unit = max(unit, bits // (dtype.itemsize * 8) if rows.format is None else UNIT)
            if rows.format is not None or dtype.short in FLOAT8:
                parts.add("decoded")
        if form.selects:
            parts.add("indices")
        if form.live.invariant or form.masked:
            parts |= {"masked", "sinks"} if cache.sinks else {"masked"}
        if self.has_tree:
            parts.add("tree")
        if form.options.softcap is not None:
            parts.add("softcap")
        return int(blocks.most_rows(unit, parts))

    def attend_kernel(self, choices: Any, workers: int, paired: bool) -> tuple[Any, tuple[Any, ...]]:
        make = blocks.make_attend_block_in_order if self.live.invariant else blocks.make_attend_block
        return make, (self.live.kernel_style, lanes.WARP)
