"""The loop of attention on CPU that converts listed rows of K, or of V, from any format to floats.

The converted rows, `CHUNK` keys of a head, stay in the worker's first-level cache, where all query rows read them.
"""

from tikv.formats import GROUP_FORMATS
from tikv.kernels.address import make_word_offset
from tikv.kernels.attention.cpu.loops import before
from tikv.kernels.attention.parameters import FLOATS, array_types
from tikv.kernels.codec import make_element_to_f32
from tikv.kernels.groups import make_column, make_value_of_code, unit_of
from tikv.runtime import ti


def make_numbers(c, width, inner):
    """numbers(rows, scales, work, ...): converts the listed keys of a head to floats, row by row of `work`."""
    return make_numbers_of_codes(c, width) if c.groups else make_numbers_of_elements(c, width, inner)


def make_numbers_of_elements(c, width, inner):
    """`make_numbers` for a dtype; each row may have a scale."""
    _, KV, _, _, SC, _ = array_types("cpu", c)
    value, word = make_element_to_f32(c.cache), make_word_offset(*inner)

    @ti.real_func
    def numbers(rows: KV, scales: SC, work: FLOATS, lists: ti.i32, scale_lists: ti.i32, first: ti.i32,
                scale_first: ti.i32, n: ti.i32, to: ti.i32, number: ti.i32):  # fmt: skip
        for j in range(n):
            row, target = before(ti.bit_cast(work[lists + j], ti.i32) + first, width), before(to + j * width, width)
            scale = ti.f32(1.0)
            if ti.static(c.scale != ""):
                scale = ti.cast(scales[ti.bit_cast(work[scale_lists + j], ti.i32) + scale_first], ti.f32)
            for d in range(width):
                work[target + d] = value(rows[row + word(d)]) * scale

    return numbers


def make_numbers_of_codes(c, width):
    """`make_numbers` for a format with groups."""
    _, KV, _, _, SC, _ = array_types("cpu", c)
    row, scale_value = GROUP_FORMATS[c.cache], make_element_to_f32(c.scale)
    value_of_code, column = make_value_of_code(c.cache, "cpu"), make_column(c.cache)  # products may be fused here
    (count, words), bits, scale_numbers = unit_of(c.cache), row.bits, width // row.group * row.numbers

    @ti.real_func
    def numbers(rows: KV, scales: SC, work: FLOATS, lists: ti.i32, scale_lists: ti.i32, first: ti.i32,
                scale_first: ti.i32, n: ti.i32, to: ti.i32, number: ti.i32):  # fmt: skip
        for j in range(n):
            row_at = before(ti.bit_cast(work[lists + j], ti.i32) + first, width // count * words)
            scale_at = before(ti.bit_cast(work[scale_lists + j], ti.i32) + scale_first, scale_numbers)
            target = before(to + j * width, width)
            for u in range(width // count):
                at = scale_at + u * count // row.group * row.numbers
                step, bias = scale_value(scales[at]), ti.f32(0.0)
                if ti.static(row.numbers == 2):
                    bias = scale_value(scales[at + 1])
                for e in ti.static(range(count)):
                    code = rows[row_at + u * words + ti.static(e * bits // 32)] >> ti.u32(ti.static(e * bits % 32))
                    if ti.static(e * bits % 32 + bits > 32):
                        more = rows[row_at + u * words + ti.static(e * bits // 32 + 1)]
                        code = code | (more << ti.u32(ti.static(32 - e * bits % 32)))
                    value = value_of_code(code & ti.u32(ti.static((1 << bits) - 1)), step, bias, 0)
                    work[target + column(u * count + e)] = value

    return numbers
