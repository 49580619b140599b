"""The fused write: split, norm, rotation, store; compared as raw bits."""

import gc
import weakref

import ml_dtypes
import numpy as np
import oracle
import pytest
from launch_counter import count_launches

import tikv
from tikv import arrays, reference, runtime
from tikv.ops import write_qkv

pytestmark = pytest.mark.full(each_value=True)

BF16 = ml_dtypes.bfloat16
HQ, H, D, TABLE = 4, 2, 16, 24
MODES = ("none", "half", "interleaved", "norm_half", "norm_interleaved")
PAIRS = {
    "f32": (np.float32, np.float32),
    "f16": (np.float16, np.float16),
    "bf16": (BF16, BF16),
    "f32_f16": (np.float32, np.float16),
    "f32_bf16": (np.float32, BF16),
    "bf16_f32": (BF16, np.float32),
}


def to_caches(rows, before, *, position, window=None, layout="head_major"):
    return reference.copy(rows, before, position=position, window=window, cache_layout=layout)


class Case:
    """Fused rows, tables and weights, and destinations full of random bits between guards."""

    def __init__(
        self, rng, arch, mode="half", dtype=np.float32, *, tokens=5, rope_dim=None, heads=(HQ, H), width=D, pad=0
    ):
        self.arch, self.rng, self.mode, self.heads, self.width = arch, rng, mode, heads, width
        columns = (heads[0] + 2 * heads[1]) * width
        make = oracle.random_bits if mode == "none" else oracle.numbers
        whole = make(rng, (tokens, columns + pad), dtype)
        self.rows = whole[:, :columns]
        self.qkv = oracle.place(whole, arch)[:, :columns]
        self.rope_dim = rope_dim
        angle = rng.uniform(-3, 3, (TABLE, (rope_dim or width) // 2))
        self.cos, self.sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        self.weights = [oracle.numbers(rng, (width,), np.float32) for _ in "qk"]
        self.how = self.norm_rope(rope_dim=rope_dim)
        self.guarded, self.placed, self.before = [], [], []

    def norm_rope(self, **changes):
        options = {"mode": self.mode}
        if self.mode != "none":
            options.update(cos=oracle.place(self.cos, self.arch), sin=oracle.place(self.sin, self.arch))
        if self.mode.startswith("norm"):
            q_weight, k_weight = (oracle.place(w, self.arch) for w in self.weights)
            options.update(q_weight=q_weight, k_weight=k_weight)
        return tikv.NormRope(**{**options, **changes})

    def destination(self, shape, dtype):
        """An array to write, random before, guarded on the host."""
        before = oracle.random_bits(self.rng, shape, dtype)
        self.before.append(before)
        self.guarded.append(oracle.Guarded(self.rng, before))
        self.placed.append(oracle.place(self.guarded[-1].array, self.arch))
        return self.placed[-1]

    def caches(self, dtype, capacity=9, layout="head_major"):
        heads = self.heads[1]
        shape = (heads, capacity, self.width) if layout == "head_major" else (capacity, heads, self.width)
        return self.destination(shape, dtype), self.destination(shape, dtype)

    def pools(self, dtype, layout, blocks=4, page=3):
        heads, width, x = self.heads[1], self.width, 16 // np.dtype(dtype).itemsize
        k = {"NHD": (blocks, page, heads, width), "HND": (blocks, heads, page, width)}.get(
            layout, (blocks, heads, width // x, page, x)
        )
        v = k if layout != "VLLM" else (blocks, heads, width, page)
        return self.destination(k, dtype), self.destination(v, dtype)

    def parts(self, positions, dtype=np.float32):
        """What Q, K and V must be, Q and K in `dtype` if they are transformed."""
        q, k, v = reference.split_qkv(self.rows, *self.heads)
        if self.mode == "none":
            return q, k, v
        options = {"mode": self.mode, "cos": self.cos, "sin": self.sin, "rope_dim": self.rope_dim, "dtype": dtype}
        return *(
            reference.norm_rope(x, positions, weight=w, **options) for x, w in zip((q, k), self.weights, strict=True)
        ), v

    def check(self, *wanted):
        """Each destination as raw bits, and nothing written around it."""
        for name, got, want, guarded in zip("kvst", self.placed, wanted, self.guarded, strict=False):
            oracle.assert_same_bits(got, want, what=name)
            guarded.check()

    def unchanged(self):
        self.check(*self.before)


def unfused(case, positions, which):
    """Q ("q") or K ("k") by the transform alone, in float32."""
    heads = case.heads
    first = 0 if which == "q" else heads[0]
    count = heads[0] if which == "q" else heads[1]
    x = case.qkv.reshape(len(case.rows), -1, case.width)[:, first : first + count]
    return write_qkv.norm_rope(x, case.how, weight=which, rope_positions=oracle.place(np.array(positions), case.arch))


# Here and below each value of a choice meets each code path that depends on it, not each value of the others: a case
# is a kernel or more to compile, up to some seconds. V moves as all rows do without a transform.
@pytest.mark.parametrize(
    ("mode", "dtypes"),
    [
        *[("half", pair) for pair in PAIRS],
        *[("interleaved", pair) for pair in ("f32", "bf16", "f32_f16")],
        *[("none", pair) for pair in ("f16", "f32_bf16")],
    ],
)
def test_a_linear_cache_bit_for_bit(arch, rng, mode, dtypes):
    src, dst = PAIRS[dtypes]
    case = Case(rng, arch, mode, src)
    k, v = case.caches(dst)
    got = tikv.write_qkv(case.qkv, k, v, num_q_heads=HQ, norm_rope=case.how, position=3)
    q, new_k, new_v = case.parts(range(3, 8))
    assert type(got) is type(case.qkv)
    # A row that is converted may hold any NaN; one that is copied keeps its bits.
    any_nan = src != dst
    oracle.assert_same_bits(got, reference.encode(q, src), what="q")
    for name, cache, rows, before in zip("kv", (k, v), (new_k, new_v), case.before, strict=True):
        oracle.assert_same_bits(cache, to_caches(rows, before, position=3), what=name, any_nan=any_nan)
    for guarded in case.guarded:
        guarded.check()


@pytest.mark.parametrize("window", [None, 4, 9])
@pytest.mark.parametrize("q_layout", ["token_major", "head_major"])
@pytest.mark.parametrize("layout", ["token_major", "head_major"])
def test_layouts_and_rings(arch, rng, layout, q_layout, window):
    case = Case(rng, arch, "half")
    k, v = case.caches(np.float32, layout=layout)
    options = {"position": 4 if window is None else 17, "window": window}
    got = tikv.write_qkv(
        case.qkv, k, v, num_q_heads=HQ, norm_rope=case.how, layout=layout, q_layout=q_layout, **options
    )
    q, new_k, new_v = case.parts(range(options["position"], options["position"] + 5))
    oracle.assert_same_bits(got, q if q_layout == "token_major" else q.swapaxes(0, 1), what="q")
    case.check(*(to_caches(r, b, layout=layout, **options) for r, b in zip((new_k, new_v), case.before, strict=True)))


def test_a_position_beyond_32_bits_is_only_the_caches(arch, rng):
    case = Case(rng, arch, "half")
    k, v = case.caches(np.float32)
    position, turned = (1 << 40) + 3, [7, 0, 23, 1, 2]
    tikv.write_qkv(
        case.qkv, k, v, num_q_heads=HQ, norm_rope=case.how, position=position, window=7, rope_positions=turned
    )
    _, new_k, new_v = case.parts(turned)
    case.check(
        *(to_caches(r, b, position=position, window=7) for r, b in zip((new_k, new_v), case.before, strict=True))
    )


@pytest.mark.full(unless=lambda case: case["rope_dim"] in (2, 4))
@pytest.mark.parametrize(("mode", "rope_dim"), [("half", 6), ("half", 4), ("interleaved", 2), ("interleaved", 8)])
def test_a_part_of_the_head_is_rotated(arch, rng, mode, rope_dim):
    case = Case(rng, arch, mode, np.float16, rope_dim=rope_dim)
    k, v = case.caches(np.float16)
    got = tikv.write_qkv(case.qkv, k, v, num_q_heads=HQ, norm_rope=case.how, position=2)
    q, new_k, new_v = case.parts(range(2, 7))
    oracle.assert_same_bits(got, reference.encode(q, np.float16), what="q")
    new_k = reference.encode(new_k, np.float16)
    case.check(*(to_caches(r, b, position=2) for r, b in zip((new_k, new_v), case.before, strict=True)))


@pytest.mark.full(unless=lambda case: case["width"] in (64, 128, 256))
@pytest.mark.parametrize(
    ("mode", "width", "dtype"),
    [
        *[("norm_half", width, np.float32) for width in (2, 6, 80, 256)],
        pytest.param("norm_half", 640, np.float32, marks=pytest.mark.full),  # as 256, in more parts
        *[("norm_interleaved", width, np.float32) for width in (10, 64, 160)],
        ("norm_half", 128, np.float16),
        ("norm_interleaved", 96, BF16),
    ],
)
def test_a_norm_bit_for_bit(arch, rng, mode, width, dtype):
    # On CPU heads are normed some at a time, and rows wider than 128 turned by parts.
    case = Case(rng, arch, mode, dtype, heads=(9, 2), width=width, tokens=4)
    k, v = case.caches(dtype)
    got = tikv.write_qkv(case.qkv, k, v, num_q_heads=9, norm_rope=case.how, position=1)
    q, new_k, new_v = case.parts(range(1, 5))
    oracle.assert_same_bits(got, reference.encode(q, dtype), what="q")
    new_k = reference.encode(new_k, dtype)
    case.check(*(to_caches(r, b, position=1) for r, b in zip((new_k, new_v), case.before, strict=True)))


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_norms_of_zeros_infinities_and_nan(arch, rng, eps):
    case = Case(rng, arch, "norm_half", tokens=5)
    case.rows[:, : HQ * D] = 0
    case.rows[1, 3], case.rows[2, 5], case.rows[3, D] = np.inf, np.nan, -np.inf
    case.rows[4, : HQ * D] = 3e38  # of which the sum of squares is infinite
    case.qkv = oracle.place(np.ascontiguousarray(case.rows), arch)
    how = case.norm_rope(eps=eps)
    k, v = case.caches(np.float32)
    got = tikv.write_qkv(case.qkv, k, v, num_q_heads=HQ, norm_rope=how, position=1)
    with np.errstate(all="ignore"):
        q = reference.norm_rope(
            reference.split_qkv(case.rows, HQ, H)[0], range(1, 6), mode="norm_half", cos=case.cos, sin=case.sin,
            weight=case.weights[0], eps=eps,
        )  # fmt: skip
    oracle.assert_same_bits(got, q, what="q", any_nan=True)


def test_two_epsilons_are_two_norms(arch, rng):
    case = Case(rng, arch, "norm_half")
    for eps in (1e-6, 0.5):
        got = write_qkv.norm_rope(oracle.place(case.rows.reshape(5, -1, D), arch), case.norm_rope(eps=eps), position=0)
        want = reference.norm_rope(
            case.rows.reshape(5, -1, D), range(5), mode="norm_half", cos=case.cos, sin=case.sin,
            weight=case.weights[0], eps=eps,
        )  # fmt: skip
        oracle.assert_same_bits(got, want, what=f"eps={eps}")


def test_each_table_may_have_strides_of_its_own(arch, rng):
    case = Case(rng, arch, "half")
    k, v = case.pools(np.float32, "NHD")
    slots, positions = np.array([7, 0, 11, 3, -1]), np.array([5, 23, 6, 0, 1])
    tables = {"cos": np.zeros((TABLE, D), np.float32), "sin": np.zeros((TABLE, 3 * D), np.float32)}
    for name, wide in tables.items():
        wide[:, : D // 2] = getattr(case, name)
        tables[name] = oracle.place(wide, arch)[:, : D // 2]
    got = tikv.write_qkv(
        case.qkv, k, v, num_q_heads=HQ, norm_rope=case.norm_rope(**tables), layout="NHD",
        slot_mapping=slots, rope_positions=positions,
    )  # fmt: skip
    q, *new = case.parts(positions)
    oracle.assert_same_bits(got, q, what="q")
    case.check(*(reference.write_slots(r, b, slots) for r, b in zip(new, case.before, strict=True)))


def test_the_tables_are_used_to_their_last_row(arch, rng):
    case = Case(rng, arch, "half")
    k, v = case.caches(np.float32)
    got = tikv.write_qkv(case.qkv, k, v, num_q_heads=HQ, norm_rope=case.how, position=TABLE - 5, window=9)
    q, *new = case.parts(range(TABLE - 5, TABLE))
    oracle.assert_same_bits(got, q, what="q")
    case.check(*(to_caches(r, b, position=TABLE - 5, window=9) for r, b in zip(new, case.before, strict=True)))


def test_weights_may_be_left_out(arch, rng):
    case = Case(rng, arch, "norm_half")
    ones = oracle.place(np.ones(D, np.float32), arch)
    caches = [case.caches(np.float32) for _ in "ab"]
    how = [case.norm_rope(q_weight=w, k_weight=w) for w in (None, ones)]
    q = [
        tikv.write_qkv(case.qkv, *c, num_q_heads=HQ, norm_rope=n, position=0)[:, :, :]
        for c, n in zip(caches, how, strict=True)
    ]
    oracle.assert_same_bits(q[0], q[1])
    written = [oracle.to_numpy(c[0])[:, :5] for c in caches]
    oracle.assert_same_bits(written[0], written[1])


@pytest.mark.full(unless=lambda case: case["dtypes"] in ("bf16", "f32_f16"))
@pytest.mark.parametrize(
    ("mode", "dtypes"),
    [("norm_half", "f32"), ("norm_half", "bf16"), ("norm_interleaved", "f16"), ("norm_interleaved", "f32_f16"),
     ("half", "f16"), ("interleaved", "bf16")],
)  # fmt: skip
def test_fused_is_unfused_bit_for_bit(arch, rng, mode, dtypes):
    src, dst = PAIRS[dtypes]
    # An odd row stride, so that the fused write has narrower words than the steps.
    case = Case(rng, arch, mode, src, rope_dim=12, pad=3, tokens=7)
    k, v = case.caches(dst, capacity=11)
    got = tikv.write_qkv(case.qkv, k, v, num_q_heads=HQ, norm_rope=case.how, position=3)
    new_v = reference.split_qkv(case.rows, *case.heads)[2]
    case.qkv = oracle.place(np.ascontiguousarray(case.rows), arch)
    q, new_k = (oracle.to_numpy(unfused(case, range(3, 10), which)) for which in "qk")
    oracle.assert_same_bits(got, reference.encode(q, src), what="q")
    case.check(
        *(to_caches(r, b, position=3) for r, b in zip((reference.encode(new_k, dst), new_v), case.before, strict=True))
    )


@pytest.mark.parametrize(
    ("mode", "layout"),
    [("norm_half", "NHD"), ("none", "NHD"), ("norm_interleaved", "HND"), ("half", "HND"), ("norm_half", "VLLM"),
     ("interleaved", "VLLM"), ("none", "VLLM")],
)  # fmt: skip
def test_pools_get_what_the_steps_give(arch, rng, mode, layout):
    case = Case(rng, arch, mode, np.float16, tokens=6)
    k, v = case.pools(np.float16, layout)
    slots, positions = [7, -1, 0, 11, 3, -9], [5, 0, 23, 6, 7, 1]
    got = tikv.write_qkv(
        case.qkv, k, v, num_q_heads=HQ, norm_rope=case.how, layout=layout,
        slot_mapping=oracle.place(np.array(slots, np.int32), arch),
        rope_positions=oracle.place(np.array(positions), arch),
    )  # fmt: skip
    q, new_k, new_v = case.parts(positions)
    q, new_k = (reference.encode(rows, np.float16) for rows in (q, new_k))
    oracle.assert_same_bits(got, q, what="q")
    case.check(
        *(reference.write_slots(r, b, slots, layout=layout) for r, b in zip((new_k, new_v), case.before, strict=True))
    )


@pytest.mark.full(unless=lambda case: case["mode"] == "norm_half" or case["src"] is BF16)
@pytest.mark.parametrize(
    ("mode", "src", "scales", "width", "rope_dim"),
    [
        ("none", np.float16, np.float32, 16, None),
        ("none", BF16, np.float16, 16, None),
        ("half", np.float32, np.float32, 16, 10),
        ("norm_half", np.float16, np.float16, 160, 150),
        ("norm_interleaved", BF16, np.float16, 16, 10),
    ],
    ids=["none-f16", "none-bf16", "half-f32", "norm_half-f16-wide", "norm_interleaved-bf16"],
)
def test_int8_caches_are_what_quantize_gives(arch, rng, mode, src, scales, width, rope_dim):
    case = Case(rng, arch, mode, src, width=width, rope_dim=rope_dim)
    if mode == "none":
        case.rows[...] = oracle.numbers(rng, case.rows.shape, src)
        case.qkv = oracle.place(case.rows, arch)
    k, v = case.caches(np.int8)
    k_scale, v_scale = (case.destination((H, 9), scales) for _ in "kv")
    tikv.write_qkv(
        case.qkv, k, v, num_q_heads=HQ, norm_rope=case.how, position=11, window=4, k_scale=k_scale, v_scale=v_scale
    )
    _, _, rows_v = reference.split_qkv(case.rows, *case.heads)
    wanted = []
    for rows in (oracle.to_numpy(unfused(case, range(11, 16), "k")), rows_v):
        wanted.append([oracle.to_numpy(a) for a in tikv.quantize(oracle.place(rows, arch), scale_dtype=scales)])
    values = [to_caches(w[0], b, position=11, window=4) for w, b in zip(wanted, case.before, strict=False)]
    kept = [
        to_caches(w[1][..., None], b[..., None], position=11, window=4)[..., 0]
        for w, b in zip(wanted, case.before[2:], strict=True)
    ]
    case.check(*values, *kept)


@pytest.mark.parametrize("layout", ["NHD", "HND", "VLLM"])
def test_int8_pools_are_what_quantize_gives(arch, rng, layout):
    case = Case(rng, arch, "norm_half", np.float16, tokens=4)
    k, v = case.pools(np.int8, layout)
    k_scale, v_scale = (case.destination((4, 3, H), np.float32) for _ in "kv")
    slots, positions = [8, -1, 2, 10], [3, 2, 1, 0]
    tikv.write_qkv(
        case.qkv, k, v, num_q_heads=HQ, norm_rope=case.how, layout=layout, slot_mapping=slots, rope_positions=positions,
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    _, _, rows_v = reference.split_qkv(case.rows, *case.heads)
    wanted = []
    for rows in (oracle.to_numpy(unfused(case, positions, "k")), rows_v):
        wanted.append([oracle.to_numpy(a) for a in tikv.quantize(oracle.place(rows, arch), scale_dtype=np.float32)])
    values = [reference.write_slots(w[0], b, slots, layout=layout) for w, b in zip(wanted, case.before, strict=False)]
    kept = [
        reference.write_slots(w[1][..., None], b[..., None], slots)[..., 0]
        for w, b in zip(wanted, case.before[2:], strict=True)
    ]
    case.check(*values, *kept)


def test_rows_behind_the_last_sequence_touch_no_sequence(arch, rng):
    """Two sequences of 3 and 2 tokens in a step padded to 8 rows: the rows past cu_seqlens[-1] name no slot.

    Were they taken for rows of sequence 0, as a search through cu_seqlens that runs off its end takes them, they would
    land on its tokens.
    """
    case = Case(rng, arch, "half", np.float16, tokens=8)
    k, v = case.pools(np.float16, "NHD")
    tables, lengths, cu_seqlens = ([2, 0], [1]), (2, 0), (0, 3, 5)
    slots, positions = np.full(8, -1), np.zeros(8, np.int64)
    for table, length, start, end in zip(tables, lengths, cu_seqlens, cu_seqlens[1:], strict=False):
        for row in range(start, end):
            position = length + row - start
            slots[row], positions[row] = table[position // 3] * 3 + position % 3, position
    assert slots.tolist() == [8, 0, 1, 3, 4, -1, -1, -1]
    tikv.write_qkv(
        case.qkv, k, v, num_q_heads=HQ, norm_rope=case.how, layout="NHD", slot_mapping=slots, rope_positions=positions
    )
    _, new_k, new_v = case.parts(positions)
    new_k = reference.encode(new_k, np.float16)
    case.check(*(reference.write_slots(r, b, slots) for r, b in zip((new_k, new_v), case.before, strict=True)))


def on_device(values, arch):
    """An index array that only the device knows; on CPU all memory is the host's."""
    if arch == "cuda":
        return oracle.place(values, arch)
    ti = runtime.ti
    array = ti.ndarray(ti.i32 if values.dtype == np.int32 else ti.i64, values.shape)
    array.from_numpy(values)
    return array


@pytest.mark.archs("vulkan", "cuda", "metal")
@pytest.mark.parametrize("index", [np.int32, np.int64], ids=["int32", "int64"])
def test_rows_that_only_the_device_knows_to_be_outside_are_skipped(arch, rng, index):
    case = Case(rng, arch, "norm_half", tokens=5)
    k, v = case.pools(np.float32, "HND")
    slots, positions = np.array([0, 12, 5, 1 << 30, 7], index), np.array([2, 1, TABLE, 3, -1], index)
    got = tikv.write_qkv(
        case.qkv, k, v, num_q_heads=HQ, norm_rope=case.how, layout="HND", slot_mapping=on_device(slots, arch),
        rope_positions=on_device(positions, arch),
    )  # fmt: skip
    inside = (positions >= 0) & (positions < TABLE)
    known = np.where(inside, positions, 0)
    q, new_k = (oracle.to_numpy(unfused(case, known, which)) for which in "qk")
    oracle.assert_same_bits(got, np.where(inside[:, None, None], q, np.float32(0)), what="q")
    _, _, new_v = case.parts(known)
    written = np.where(inside & (slots < 12), slots, -1)
    case.check(
        *(reference.write_slots(r, b, written, layout="HND") for r, b in zip((new_k, new_v), case.before, strict=True))
    )


def test_in_debug_mode_the_device_is_asked(arch, rng, debug):
    case = Case(rng, arch, "half", tokens=3)
    k, v = case.pools(np.float32, "NHD")
    options = {"num_q_heads": HQ, "norm_rope": case.how, "layout": "NHD"}
    debug()
    for slots, positions, message in (
        ([1, 2, 1], [0, 1, 2], "more than once"),
        ([1, 2, 12], [0, 1, 2], "beyond the pool"),
        ([1, 2, 3], [0, 1, TABLE], "outside the tables"),
        ([1, 2, 3], [0, -1, 2], "outside the tables"),
    ):
        given = (on_device(np.array(a), arch) for a in (slots, positions))
        with pytest.raises(tikv.PositionError, match=message):
            tikv.write_qkv(case.qkv, k, v, slot_mapping=next(given), rope_positions=next(given), **options)
    case.unchanged()


def test_q_goes_where_it_is_asked_to(arch, rng):
    case = Case(rng, arch, "half", np.float16)
    k, v = case.caches(np.float16)
    wide = case.destination((5, HQ, D + 4), np.float16)
    out = wide[:, :, 2 : 2 + D]
    for _ in range(2):
        got = tikv.write_qkv(case.qkv, k, v, num_q_heads=HQ, norm_rope=case.how, position=0, out=out)
        assert got is out
    want = case.before[2].copy()
    want[:, :, 2 : 2 + D] = reference.encode(case.parts(range(5))[0], np.float16)
    oracle.assert_same_bits(wide, want, what="q")


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("threads", "tokens"),
    [(2, 1031), (7, 1031), (7, 2048), (64, 1500)],
    ids=["two", "seven", "seven evenly", "as many as there is work for"],
)
def test_many_tokens_are_shared_out(arch, rng, threads, tokens, monkeypatch):
    """All rows arrive, whatever the number of threads that take a share each; nothing is written behind them."""
    case = Case(rng, arch, "half", tokens=tokens)
    k, v = case.caches(np.float32, capacity=tokens + 3)
    turned = rng.integers(0, TABLE, tokens)
    monkeypatch.setattr(arrays.runtime_of(), "threads", threads)
    got = tikv.write_qkv(
        case.qkv, k, v, num_q_heads=HQ, norm_rope=case.how, position=2, rope_positions=oracle.place(turned, arch)
    )
    q, new_k, new_v = case.parts(turned)
    oracle.assert_same_bits(got, q, what="q")
    case.check(*(to_caches(r, b, position=2) for r, b in zip((new_k, new_v), case.before, strict=True)))


@pytest.mark.parametrize("kind", ["torch", "taichi"])
def test_q_is_of_the_kind_of_qkv(arch, rng, kind):
    case = Case(rng, arch, "half")
    k, v = case.caches(np.float32)
    if kind == "torch":
        torch = pytest.importorskip("torch")
        given, wanted = oracle.to_torch(case.rows, arch), torch.Tensor
    else:
        given, wanted = runtime.ti.ndarray(runtime.ti.f32, case.rows.shape), tikv.CacheArray
        given.from_numpy(np.ascontiguousarray(case.rows))
    got = tikv.write_qkv(given, k, v, num_q_heads=HQ, norm_rope=case.how, position=1)
    assert isinstance(got, wanted)
    q, new_k, new_v = case.parts(range(1, 6))
    oracle.assert_same_bits(got, q, what="q")
    case.check(*(to_caches(r, b, position=1) for r, b in zip((new_k, new_v), case.before, strict=True)))


def test_calls_again_with_other_arrays_and_positions(arch, rng):
    first, second = (Case(rng, arch, "norm_half", np.float16) for _ in "ab")
    for position in (0, 4, 1):
        for case in (first, second):
            k, v = case.placed[:2] or case.caches(np.float16)
            got = tikv.write_qkv(case.qkv, k, v, num_q_heads=HQ, norm_rope=case.how, position=position)
            q, new_k = (
                oracle.to_numpy(unfused(case, range(position, position + 5), w)).astype(np.float16) for w in "qk"
            )
            oracle.assert_same_bits(got, q, what="q")
            new_v = reference.split_qkv(case.rows, *case.heads)[2]
            case.before = [to_caches(r, b, position=position) for r, b in zip((new_k, new_v), case.before, strict=True)]
            case.check(*case.before)


@pytest.mark.parametrize("placement", ["cache", "pool"])
def test_zero_tokens_are_a_success(arch, rng, placement):
    case = Case(rng, arch, "norm_half", tokens=0)
    if placement == "cache":
        k, v = case.caches(np.float32)
        where = {"position": 9}
    else:
        k, v = case.pools(np.float32, "HND")
        where = {"slot_mapping": [], "rope_positions": [], "layout": "HND"}
    got = tikv.write_qkv(case.qkv, k, v, num_q_heads=HQ, norm_rope=case.how, **where)
    assert tuple(got.shape) == (0, HQ, D)
    case.unchanged()


def test_everything_takes_one_launch(arch, rng, monkeypatch):
    case = Case(rng, arch, "norm_half", np.float16, tokens=6)
    k, v = case.pools(np.int8, "NHD")
    k_scale, v_scale = (case.destination((4, 3, H), np.float16) for _ in "kv")
    launches = count_launches(monkeypatch)
    tikv.write_qkv(
        case.qkv, k, v, num_q_heads=HQ, norm_rope=case.how, layout="NHD", slot_mapping=[0, 1, 2, 3, -1, 5],
        rope_positions=[4, 5, 0, 1, 0, 9], k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    assert len(launches) == 1
    assert launches[0].startswith("write_qkv(")


def test_nothing_of_the_callers_is_kept(arch, rng):
    case = Case(rng, arch, "norm_half")
    k, v = case.caches(np.float32)
    tikv.write_qkv(case.qkv, k, v, num_q_heads=HQ, norm_rope=case.how, position=0)
    alive = [weakref.ref(a) for a in (case.how, case.qkv, k, v)]
    del case, k, v
    gc.collect()
    assert [a() for a in alive] == [None] * 4


REFUSED = {
    "qkv of another width": ({"qkv": (5, 127)}, tikv.ShapeError, "width of qkv"),
    "qkv with three axes": ({"qkv": (5, 8, 16)}, tikv.ShapeError, "axes"),
    "float64": ({"qkv": np.float64}, tikv.DTypeError, "float32, float16 or bfloat16"),
    "float16 into float32": ({"qkv": np.float16}, tikv.DTypeError, "cannot copy float16 into float32"),
    "no query heads": ({"num_q_heads": 0}, tikv.PositionError, "num_q_heads=0"),
    "more query heads than there are": ({"num_q_heads": 5}, tikv.ShapeError, "width of qkv"),
    "K and V unlike": ({"v_dst": (2, 9, 8)}, tikv.ShapeError, "the same shape"),
    "neither position nor slots": ({"position": None}, tikv.PositionError, "neither"),
    "both": ({"slot_mapping": [0] * 5, "layout": "NHD"}, tikv.PositionError, "slot_mapping to pools"),
    "no such position": ({"position": -1}, tikv.PositionError, "position=-1"),
    "a full cache": ({"position": 5}, tikv.CapacityError, "position=5 \\+ num_tokens=5 > capacity=9"),
    "a window too wide": ({"window": 10}, tikv.CapacityError, "window=10"),
    "tables too short": ({"position": 20, "window": 9}, tikv.PositionError, "24 positions"),
    "a rope position too far": ({"rope_positions": [0, 1, 24, 3, 4]}, tikv.PositionError, r"\[2\]=24"),
    "a rope position too low": ({"rope_positions": [0, -1, 2, 3, 4]}, tikv.PositionError, r"\[1\]=-1"),
    "too few rope positions": ({"rope_positions": [0, 1]}, tikv.ShapeError, "length of rope_positions"),
    "rope positions that are not integers": ({"rope_positions": [0.5] * 5}, tikv.DTypeError, "rope_positions"),
    "no such layout": ({"layout": "NHD"}, tikv.OptionError, "layout"),
    "no such q_layout": ({"q_layout": "HND"}, tikv.OptionError, "q_layout"),
    "scales that do not belong": ({"k_scale": (2, 9), "v_scale": (2, 9)}, tikv.DTypeError, "only int8"),
    "a norm_rope that is none": ({"norm_rope": "half"}, tikv.OptionError, "NormRope"),
    "an out of another shape": ({"out": (4, 5, 16)}, tikv.ShapeError, "out is"),
    "K into V": ({"v_dst": "k_dst"}, tikv.ShapeError, "overlap"),
    "a destination in the source": ({"out": "qkv"}, tikv.ShapeError, "overlap"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused_is_refused_before_any_write(arch, rng, why):
    changes, error, message = REFUSED[why]
    if changes.get("qkv") is np.float64 and arch not in ("cpu", "cuda"):
        pytest.skip("there is no float64 on this back end")
    case = Case(rng, arch, "half")
    k, v = case.caches(np.float32)
    arguments = {"qkv": case.qkv, "k_dst": k, "v_dst": v, "num_q_heads": HQ, "norm_rope": case.how, "position": 0}
    for name, value in changes.items():
        if isinstance(value, tuple):
            value = oracle.place(np.zeros(value, np.float32), arch)
        elif isinstance(value, type):
            value = oracle.place(case.rows.astype(value), arch)
        elif isinstance(value, str) and value in arguments:
            value = arguments[value] if value == "k_dst" else case.qkv[:, : HQ * D].reshape(5, HQ, D)
        arguments[name] = value
    before = oracle.to_numpy(case.qkv).copy()
    with pytest.raises(error, match=message):
        tikv.write_qkv(**arguments)
    case.unchanged()
    oracle.assert_same_bits(case.qkv, before, what="qkv")


POOLS_REFUSED = {
    "a slot beyond the pool": ({"slot_mapping": [0, 1, 12, 3, 4]}, tikv.PositionError, r"\[2\]=12"),
    "too few slots": ({"slot_mapping": [0, 1]}, tikv.ShapeError, "length of slot_mapping"),
    "no rope positions": ({"rope_positions": None}, tikv.PositionError, "rope_positions"),
    "a window": ({"window": 4}, tikv.PositionError, "slot_mapping to pools"),
    "a layout of caches": ({"layout": "head_major"}, tikv.OptionError, "layout"),
    "no scales": ({"k_scale": None, "v_scale": None}, tikv.ShapeError, "need both"),
    "one scale": ({"v_scale": None}, tikv.ShapeError, "need both"),
    "scales of another shape": ({"k_scale": (4, 3)}, tikv.ShapeError, "k_scale"),
}


@pytest.mark.parametrize("why", POOLS_REFUSED)
def test_pools_refuse_before_any_write(arch, rng, why):
    changes, error, message = POOLS_REFUSED[why]
    case = Case(rng, arch, "half")
    k, v = case.pools(np.int8, "NHD")
    k_scale, v_scale = (case.destination((4, 3, H), np.float32) for _ in "kv")
    arguments = {
        "slot_mapping": range(5),
        "rope_positions": range(5),
        "layout": "NHD",
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    for name, value in changes.items():
        arguments[name] = np.zeros(value, np.float32) if isinstance(value, tuple) else value
    with pytest.raises(error, match=message):
        tikv.write_qkv(case.qkv, k, v, num_q_heads=HQ, norm_rope=case.how, **arguments)
    case.unchanged()


def test_scales_of_two_memory_layouts_are_refused(arch, rng):
    case = Case(rng, arch, "half")
    k, v = case.pools(np.int8, "NHD")
    k_scale, wide = case.destination((4, 3, H), np.float32), case.destination((4, 3, 2 * H), np.float32)
    with pytest.raises(tikv.ShapeError, match="different strides"):
        tikv.write_qkv(
            case.qkv, k, v, num_q_heads=HQ, norm_rope=case.how, layout="NHD", slot_mapping=range(5),
            rope_positions=range(5), k_scale=k_scale, v_scale=wide[:, :, :H],
        )  # fmt: skip
    case.unchanged()


@pytest.mark.parametrize("mode", [m for m in MODES if m != "none"])
def test_odd_widths_are_refused_where_pairs_are_rotated(arch, rng, mode):
    case = Case(rng, arch, mode, width=5)
    k, v = case.caches(np.float32)
    with pytest.raises(tikv.ShapeError, match="head_dim=5 is odd"):
        tikv.write_qkv(case.qkv, k, v, num_q_heads=HQ, norm_rope=case.how, position=0)
    case.unchanged()


def test_odd_widths_are_written_where_nothing_is_rotated(arch, rng):
    case = Case(rng, arch, "none", np.float16, width=5)
    k, v = case.caches(np.float16)
    got = tikv.write_qkv(case.qkv, k, v, num_q_heads=HQ, position=2)
    q, *new = case.parts(range(5))
    oracle.assert_same_bits(got, q, what="q")
    case.check(*(to_caches(r, b, position=2) for r, b in zip(new, case.before, strict=True)))


TABLES = {"cos": np.ones((4, 8), np.float32), "sin": np.zeros((4, 8), np.float32)}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mode": "spiral"}, tikv.OptionError, "spiral"),
        ({"mode": "half"}, tikv.OptionError, "needs cos"),
        ({"mode": "none", **TABLES}, tikv.OptionError, "does not use cos"),
        ({"mode": "half", "q_weight": np.ones(8, np.float32), **TABLES}, tikv.OptionError, "does not use q_weight"),
        (
            {"mode": "half", **TABLES, "sin": np.zeros((5, 8), np.float32)},
            tikv.ShapeError,
            "both must have the same shape",
        ),
        ({"mode": "half", **TABLES, "cos": np.ones((4, 8))}, tikv.DTypeError, "must be float32"),
        ({"mode": "half", **TABLES, "cos": np.ones(8, np.float32)}, tikv.ShapeError, "cos"),
        ({"mode": "half", **TABLES, "rope_dim": 7}, tikv.ShapeError, "rope_dim=7 is odd"),
        ({"mode": "half", **TABLES, "rope_dim": 0}, tikv.PositionError, "rope_dim=0"),
        ({"mode": "none", "rope_dim": 4}, tikv.OptionError, "does not rotate"),
        ({"mode": "norm_half", **TABLES, "eps": -1.0}, tikv.PositionError, "eps"),
    ],
)
def test_a_norm_rope_that_cannot_be(options, error, message):
    with pytest.raises(error, match=message):
        tikv.NormRope(**options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_dim": 18}, "rope_dim=18 exceeds head_dim=16"),
        ({"rope_dim": 8}, "columns of cos and sin"),
        ({"q_weight": np.ones(8, np.float32)}, "length of q_weight"),
        ({"k_weight": np.ones(8, np.float32)}, "length of k_weight"),
    ],
)
def test_a_norm_rope_that_does_not_fit_the_head(arch, rng, changes, message):
    case = Case(rng, arch, "norm_half")
    k, v = case.caches(np.float32)
    with pytest.raises(tikv.ShapeError, match=message):
        tikv.write_qkv(case.qkv, k, v, num_q_heads=HQ, norm_rope=case.norm_rope(**changes), position=0)
    case.unchanged()


@pytest.mark.archs("cpu", "cuda")
def test_one_array_given_twice_is_two_to_later_calls(arch, rng):
    """Slots that are also the rotary positions, as in a first prefill, and then other slots than positions."""
    angles = np.arange(16, dtype=np.float32)[:, None]
    weights = [oracle.numbers(rng, (2,), np.float32) for _ in "qk"]
    rows = oracle.numbers(rng, (2, 6), np.float32)

    def run(slots, positions, q_weight, k_weight):
        tables = {"cos": np.cos(angles), "sin": np.sin(angles), "q_weight": q_weight, "k_weight": k_weight}
        how = tikv.NormRope("norm_half", **{n: oracle.place(a, arch) for n, a in tables.items()})
        pools = [oracle.place(np.zeros((4, 2, 1, 2), np.float32), arch) for _ in "kv"]
        q = tikv.write_qkv(
            oracle.place(rows, arch),
            *pools,
            num_q_heads=1,
            norm_rope=how,
            slot_mapping=slots,
            rope_positions=positions,
            layout="NHD",
        )
        return [oracle.to_numpy(a) for a in (q, *pools)]

    def index(*values):
        return oracle.place(np.array(values), arch)

    want = run(index(2, 3), index(5, 6), *weights)
    arrays.runtime_of().plans.clear()
    same = index(0, 1)
    run(same, same, weights[0], weights[0])
    for found, right in zip(run(index(2, 3), index(5, 6), *weights), want, strict=True):
        oracle.assert_same_bits(found, right)


def test_a_cache_without_slots_is_full(arch, rng):
    row, empty = oracle.place(np.ones((1, 6), np.float32), arch), oracle.place(np.zeros((1, 0, 2), np.float32), arch)
    with pytest.raises(tikv.CapacityError, match="capacity=0"):
        tikv.write_qkv(row, empty, oracle.place(np.zeros((1, 0, 2), np.float32), arch), num_q_heads=1, position=0)


def test_without_kv_heads_there_is_only_q(arch, rng):
    row = oracle.numbers(rng, (1, 2), np.float32)
    for shape, where in (
        ((0, 4, 2), {"position": 0}),
        ((3, 4, 0, 2), {"slot_mapping": np.array([1]), "layout": "NHD"}),
    ):
        k, v = (oracle.place(np.zeros(shape, np.float32), arch) for _ in "kv")
        q = tikv.write_qkv(oracle.place(row, arch), k, v, num_q_heads=1, **where)
        oracle.assert_same_bits(oracle.to_numpy(q).ravel(), row.ravel())
