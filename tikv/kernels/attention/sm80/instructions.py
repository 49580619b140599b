"""The instructions of tensor cores that Taichi does not know, and what all of their kernels share."""

import functools
import pathlib
from typing import Any, NamedTuple

from tikv.kernels.lanes import ALL, BLOCK
from tikv.runtime import engine_in_use, ti

SOURCE = pathlib.Path(__file__).with_name("tensor_cores.ll")
BITCODE = SOURCE.with_suffix(".bc")  # llvm-as-14 tensor_cores.ll -o tensor_cores.bc
HALVES = ("f16", "bf16")  # of K, V and q; else they are codes
ROWS = 8  # of a product
WARPS = BLOCK // 32
INFINITE = {"f16": 0x7C00, "bf16": 0x7F80}  # the exponent of infinities and NaNs
ONES = {"f16": 0x3C003C00, "bf16": 0x3F803F80}


class Fragments(NamedTuple):
    """How K, V and the queries of a kind become what tensor cores multiply: a lane's registers, and the functions."""

    keys: int  # registers of two keys
    values: int  # of four rows of V
    queries: int
    results: int
    load_queries: Any
    load_keys: Any
    load_values: Any
    scores: Any
    clear: Any
    add_values: Any
    settle: Any  # settle(acc, ...): what results are kept as becomes what they are
    column_of: Any
    apart: int  # columns from the first to the second of those that a lane has in a fragment of the result


@functools.cache
def instructions():
    """The functions of `tensor_cores.ll`, to be called in kernels."""
    return engine_in_use().bitcode(str(BITCODE))


@ti.func
def lane_bits(bits, lane):
    """The 32 bits that another lane of the warp has."""
    return ti.bit_cast(ti.simt.warp.shfl_sync_i32(ti.u32(ALL), ti.bit_cast(bits, ti.i32), lane), ti.u32)


@ti.func
def transposed(y, lane):
    """The 8 x 8 halves that the warp holds, transposed."""
    source, shift = (lane & 3) * 8 + (lane >> 3), ti.cast((lane >> 2 & 1) * 16, ti.u32)
    low, high = lane_bits(y, source), lane_bits(y, source + 4)
    return ((low >> shift) & ti.u32(0xFFFF)) | ((high >> shift) << ti.u32(16))


def make_add_product(c):
    """add_product(sums, n, a, b): sums[n] += a * b.

    Under `invariant` it is one instruction. Of sums of products LLVM makes some that it rounds once, and chooses their
    order, in one kernel otherwise than in the next.
    """
    ext = instructions()

    @ti.func
    def add_product(sums: ti.template(), n: ti.template(), a, b):
        if ti.static(c.invariant):
            ext.add_product(sums[n], a, b)
        else:
            sums[n] += a * b

    return add_product


def make_clear(first, each, infinite, c):
    """clear(counts, vf) -> not 0 if rows may miss something: zeros for what has no weight and may be infinite.

    That is what nobody sees: of each of a lane's four rows of V, `each` registers of two halves, from register `first`
    on. Where rows of a task see different keys it is the infinities and NaNs of all that lie in a tile with such keys,
    whoever sees them; `infinite` is their exponent.
    """
    clear_infinite = instructions().clear_infinite
    carry = (0x8000 - infinite) * 0x10001

    @ti.func
    def clear(counts: ti.template(), vf: ti.template()):
        infinite, step = ti.u32(0), ti.u32(carry)
        if ti.static(c.masked):
            for n in ti.static(range(first, first + 4 * each, 4)):
                clear_infinite(vf[n], vf[ti.static(n + 1)], vf[ti.static(n + 2)], vf[ti.static(n + 3)], infinite, step)
        else:
            for i in ti.static(range(4)):
                for n in ti.static(range(first + i * each, first + (i + 1) * each)):
                    vf[n] = ti.select(counts[ti.static(i + 2)] != 0, vf[n], ti.u32(0))
        return ti.select((infinite & ti.u32(0x80008000)) != ti.u32(0), 1, 0)

    return clear


def make_weigh(x, half):
    """weigh(lane, p, b, sums): the weights as fragments `b`, two for each tile of rows; their sums are added up."""
    ext = instructions()
    multiply, pack = getattr(ext, f"multiply_{half}"), getattr(ext, f"pack_{half}")

    @ti.func
    def weigh(lane, p: ti.template(), b: ti.template(), sums: ti.template()):
        ones = ti.u32(ONES[half])
        for g in ti.static(range(x.row_tiles)):
            for i in ti.static(range(2)):
                word = ti.u32(0)
                pack(word, p[ti.static(4 * g + 2 * i)], p[ti.static(4 * g + 2 * i + 1)])
                b[ti.static(2 * g + i)] = transposed(word, lane)
            o = ti.static(4 * g)
            multiply(sums[o], sums[ti.static(o + 1)], sums[ti.static(o + 2)], sums[ti.static(o + 3)], ones, ones, ones,
                     ones, b[ti.static(2 * g)], b[ti.static(2 * g + 1)])  # fmt: skip

    return weigh
