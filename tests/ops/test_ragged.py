"""Ragged appends and their plan: whole caches as raw bits, every offset that could go wrong, every refusal."""

import types

import ml_dtypes
import numpy as np
import oracle
import pytest
from launch_counter import count_launches, refuse_plans

import tikv
from tikv import reference, runtime

BF16 = ml_dtypes.bfloat16
HUGE = 2**62
OFFSETS = {
    "start": [0, 0, 0],
    "same": [7, 7, 7],
    "one row too many": [1, 9, 12],
    "exact fit": [11, 0, 11],
    "full": [16, 17, 15],
    "before the start": [-1, -2, -5],
    "far outside": [-HUGE, HUGE, 2**63 - 1],
}


@pytest.fixture
def real(arch):
    """A dtype, or a skip where the back end has none such."""

    def check(dtype):
        if np.dtype(dtype) == np.float64 and arch not in ("cpu", "cuda"):
            pytest.skip("there is no float64 on this back end")
        return np.dtype(dtype)

    return check


class Case:
    """New rows, caches full of random bits between guards, and offsets, as the back end takes them."""

    def __init__(self, rng, arch, *, shape=(3, 4, 5, 16), widths=(8, 6), dtypes=(np.float32, np.float32), offsets=None):
        batch, heads, tokens, capacity = shape
        self.arch = arch
        self.new = [oracle.numbers(rng, (batch, heads, tokens, d), dtypes[0]) for d in widths]
        if dtypes[0] == dtypes[1]:
            self.new = [oracle.random_bits(rng, a.shape, a.dtype) for a in self.new]
        self.before = [oracle.random_bits(rng, (batch, heads, capacity, d), dtypes[1]) for d in widths]
        self.guarded = [oracle.Guarded(rng, cache) for cache in self.before]
        self.offsets = np.array([0] * batch if offsets is None else offsets, np.int64)
        self.placed = [oracle.place(a, arch) for a in self.new]
        self.caches = [oracle.place(g.array, arch) for g in self.guarded]

    def args(self, offsets=None):
        return tikv.KVCacheAppendArgs(
            k_new=self.placed[0],
            v_new=self.placed[1],
            cache_offsets=self.offsets if offsets is None else offsets,
            k_cache=self.caches[0],
            v_cache=self.caches[1],
        )

    def append(self, offsets=None):
        tikv.append_ragged(*self.placed, *self.caches, self.offsets if offsets is None else offsets)

    def check(self, offsets=None):
        offsets = self.offsets if offsets is None else offsets
        for name, new, old, cache, guarded in zip("kv", self.new, self.before, self.caches, self.guarded, strict=True):
            oracle.assert_same_bits(cache, reference.append_ragged(new, old, offsets), what=name)
            guarded.check()

    def unchanged(self):
        for name, old, cache, guarded in zip("kv", self.before, self.caches, self.guarded, strict=True):
            oracle.assert_same_bits(cache, old, what=name)
            guarded.check()


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16, np.float64], ids=lambda d: np.dtype(d).name)
def test_rows_outside_are_skipped_on_both_sides(arch, rng, real, dtype, offsets):
    case = Case(rng, arch, dtypes=(real(dtype),) * 2, offsets=OFFSETS[offsets])
    case.append()
    case.check()
    assert case.offsets.tolist() == OFFSETS[offsets], "the offsets are only read"


@pytest.mark.parametrize("to", [np.float16, BF16], ids=lambda d: np.dtype(d).name)
def test_rows_are_narrowed_as_copies_narrow_them(arch, rng, to):
    case = Case(rng, arch, dtypes=(np.float32, to), offsets=OFFSETS["one row too many"])
    case.append()
    case.check()


@pytest.mark.parametrize("index", [np.int32, np.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("where", ["numpy", "torch", "taichi"])
def test_offsets_may_lie_anywhere(arch, rng, where, index):
    case = Case(rng, arch, offsets=[-2, 3, 14])
    values = case.offsets.astype(index)
    if where == "torch":
        pytest.importorskip("torch")
        offsets = oracle.to_torch(values, arch)
    elif where == "taichi":
        ti = runtime.ti
        offsets = ti.ndarray(ti.i32 if index is np.int32 else ti.i64, (3,))
        offsets.from_numpy(values)
    else:
        offsets = values
    case.append(offsets)
    case.check()
    assert oracle.to_numpy(offsets).tolist() == [-2, 3, 14]


def test_a_sequence_of_one(arch, rng):
    case = Case(rng, arch, shape=(1, 2, 3, 5), offsets=[3])
    case.append()
    case.check()


def test_skewed_lengths(arch, rng):
    case = Case(rng, arch, shape=(6, 2, 3, 40), offsets=[37, 0, 0, 1, 38, 39])
    case.append()
    case.check()


def test_strided_rows_and_caches_are_used_in_place(arch, rng):
    batch, heads, tokens, capacity, width = 3, 4, 5, 9, 8
    fused = oracle.random_bits(rng, (batch, tokens, 3 * heads * width), np.float16)
    layers = oracle.random_bits(rng, (batch, 2, heads, capacity, width), np.float16)
    before, placed_rows, placed = layers.copy(), oracle.place(fused, arch), oracle.place(layers, arch)

    def heads_of(array, i):
        part = array[:, :, i * heads * width : (i + 1) * heads * width]
        return part.reshape(batch, tokens, heads, width).swapaxes(1, 2)

    offsets = np.array([-1, 4, 7])
    tikv.append_ragged(heads_of(placed_rows, 1), heads_of(placed_rows, 2), placed[:, 0], placed[:, 1], offsets)
    for i in (0, 1):
        before[:, i] = reference.append_ragged(heads_of(fused, 1 + i), before[:, i], offsets)
    oracle.assert_same_bits(placed, before)


@pytest.mark.parametrize("axis", range(4), ids=["B", "H", "L", "M"])
def test_an_extent_of_zero_is_a_success(arch, rng, axis):
    shape = [2, 2, 3, 4]
    shape[axis] = 0
    case = Case(rng, arch, shape=tuple(shape))
    case.append()
    case.unchanged()
    tikv.KVCacheAppendPlan.select(describe(case)).run(case.args())
    case.unchanged()


@pytest.mark.parametrize("widths", [(0, 6), (8, 0), (0, 0)], ids=str)
def test_a_width_of_zero_skips_that_tensor_only(arch, rng, widths):
    case = Case(rng, arch, widths=widths, offsets=[-1, 3, 14])
    for _ in range(2):
        case.append()
        case.check()


def test_keys_and_values_take_one_launch(arch, rng, monkeypatch):
    launches = count_launches(monkeypatch)
    case = Case(rng, arch, shape=(3, 3, 5, 17))
    case.append()
    case.check()
    assert len(launches) == 1


def describe(case, **changes):
    batch, heads, tokens, _ = case.new[0].shape
    fields = {
        "batch_size": batch,
        "num_heads": heads,
        "new_len": tokens,
        "max_cache_len": case.before[0].shape[2],
        "d_k": case.new[0].shape[3],
        "d_v": case.new[1].shape[3],
        "dtype": case.new[0].dtype,
    }
    return tikv.KVCacheAppendDescriptor(**{**fields, **changes})


@pytest.mark.parametrize("offsets", [[0, 0, 0], [7, 7, 7], [1, 9, 12]], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, BF16], ids=lambda d: np.dtype(d).name)
def test_the_originals_own_case(arch, real, dtype, offsets):
    """B=3, H=4, L=5, M=16, d_k=8, d_v=6 with its fills; 12 + 5 > 16 drops the last row."""
    dtype = real(dtype)

    def fill(shape, start, step):
        return (start + step * np.arange(np.prod(shape))).reshape(shape).astype(dtype)

    k_new, v_new = fill((3, 4, 5, 8), 1, 0.0625), fill((3, 4, 5, 6), -1, -0.0625)
    before = [fill((3, 4, 16, 8), 100, 0.5), fill((3, 4, 16, 6), -100, -0.5)]
    caches = [oracle.place(cache.copy(), arch) for cache in before]
    plan = tikv.KVCacheAppendPlan.select(
        tikv.KVCacheAppendDescriptor(
            batch_size=3, num_heads=4, new_len=5, max_cache_len=16, d_k=8, d_v=6, dtype=dtype.name
        )
    )
    args = tikv.KVCacheAppendArgs(
        k_new=oracle.place(k_new, arch),
        v_new=oracle.place(v_new, arch),
        cache_offsets=oracle.place(np.array(offsets), arch),
        k_cache=caches[0],
        v_cache=caches[1],
    )
    assert plan.can_implement(args)
    plan.run(args)
    for name, new, old, cache in zip("kv", (k_new, v_new), before, caches, strict=True):
        want = old.copy()
        for b in range(3):
            for slot in range(offsets[b], min(16, offsets[b] + 5)):
                want[b, :, slot] = new[b, :, slot - offsets[b]]
        oracle.assert_same_bits(cache, want, what=name)


def test_a_plan_says_what_it_is(arch):
    plan = tikv.KVCacheAppendPlan.select(
        tikv.KVCacheAppendDescriptor(batch_size=2, num_heads=3, new_len=4, max_cache_len=5, d_k=6, d_v=7)
    )
    assert plan.workspace_size == 0
    assert plan.precision_guarantee.bit_exact
    assert plan.precision_guarantee.deterministic
    assert plan.sku == f"append_ragged_f16_h3_k6_v7_{arch}"
    assert plan.sku in repr(plan)


def test_a_plan_binds_once(arch, rng, monkeypatch):
    """Later runs with the same arrays only launch; with others, they are the others' bits."""
    first, second = (Case(rng, arch, dtypes=(np.float16,) * 2, offsets=[3, -1, 14]) for _ in range(2))
    plan = tikv.KVCacheAppendPlan.select(describe(first))
    plan.run(first.args(oracle.place(first.offsets, arch)))
    first.check()
    # On Vulkan and Metal these arrays are the host's, and each run brings them over.
    if arch in ("cpu", "cuda"):
        refuse_plans(monkeypatch)
    first.offsets[:] = [0, 1, 2]
    again = first.args(oracle.place(first.offsets, arch))
    first.before = [oracle.to_numpy(cache).copy() for cache in first.caches]
    plan.run(again)
    first.check()
    first.before = [oracle.to_numpy(cache).copy() for cache in first.caches]
    monkeypatch.undo()
    plan.run(second.args(oracle.place(second.offsets, arch)))
    second.check()
    first.unchanged()


def test_a_plan_of_another_runtime_is_refused(arch, rng):
    case = Case(rng, arch)
    plan = tikv.KVCacheAppendPlan.select(describe(case))
    plan.runtime = types.SimpleNamespace(program=object(), epoch=1, front=runtime.current().front)
    for call in (plan.can_implement, plan.run):
        with pytest.raises(tikv.StaleRuntimeError, match="epoch 1"):
            call(case.args())
    case.unchanged()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"batch_size": -1}, tikv.ShapeError, "batch_size=-1 is negative"),
        ({"max_cache_len": -3}, tikv.ShapeError, "max_cache_len=-3"),
        ({"d_v": 2.5}, tikv.DTypeError, "d_v is 2.5"),
        ({"dtype": "int8"}, tikv.DTypeError, "dtype is int8"),
        ({"dtype": "float8"}, tikv.DTypeError, "unknown dtype"),
    ],
    ids=str,
)
def test_a_problem_that_no_plan_solves(arch, change, error, match):
    fields = {"batch_size": 1, "num_heads": 1, "new_len": 1, "max_cache_len": 1, "d_k": 1, "d_v": 1}
    with pytest.raises(error, match=match):
        tikv.KVCacheAppendPlan.select(tikv.KVCacheAppendDescriptor(**{**fields, **change}))


@pytest.mark.archs("vulkan", "metal")
def test_float64_is_refused_where_it_does_not_exist(arch, rng):
    with pytest.raises(tikv.DTypeError, match="float64"):
        tikv.KVCacheAppendPlan.select(
            tikv.KVCacheAppendDescriptor(
                batch_size=1, num_heads=1, new_len=1, max_cache_len=1, d_k=1, d_v=1, dtype="float64"
            )
        )
    case = Case(rng, arch, dtypes=(np.float64,) * 2)
    with pytest.raises(tikv.DTypeError, match="float64"):
        case.append()
    case.unchanged()


# What is wrong with the five arrays, in the order (k_new, v_new, k_cache, v_cache, cache_offsets) of the call.
REFUSED = {
    "k_new of another width": (0, lambda a: a[..., :7], tikv.ShapeError, "elements of a row"),
    "k_new without an axis": (0, lambda a: a[0], tikv.ShapeError, "axes"),
    "v_new of other heads": (1, lambda a: a[:, :3], tikv.ShapeError, "heads"),
    "v_new of fewer rows": (1, lambda a: a[:, :, :4], tikv.ShapeError, "new tokens"),
    "v_new of another dtype": (1, lambda a: np.zeros_like(a, np.float16), tikv.DTypeError, "the same dtype"),
    "k_cache of fewer sequences": (2, lambda a: a[:2], tikv.ShapeError, "sequences"),
    "v_cache of fewer slots": (3, lambda a: a[:, :, :15], tikv.ShapeError, "slots"),
    "v_cache of another dtype": (3, lambda a: a.view(np.int32), tikv.DTypeError, "dtype"),
    "rows that are not contiguous": (0, lambda a: np.repeat(a, 2, axis=3)[..., ::2], tikv.ShapeError, "contiguous"),
    "a cache that is not contiguous": (2, lambda a: a[..., ::-1], tikv.ShapeError, "contiguous"),
    "too few offsets": (4, lambda a: a[:2], tikv.ShapeError, "length of cache_offsets"),
    "offsets in two axes": (4, lambda a: a[None], tikv.ShapeError, "axes"),
    "offsets that are a column": (4, lambda a: np.stack([a, a], axis=1)[:, 0], tikv.ShapeError, "contiguous"),
    "offsets that are not integers": (4, lambda a: a.astype(np.float32), tikv.DTypeError, "int32 or int64"),
    "a cache that is read-only": (2, lambda a: np.broadcast_to(a, a.shape), tikv.ShapeError, "read-only"),
    "not an array": (1, lambda a: a.tolist(), tikv.DTypeError, "not an array"),
}


@pytest.mark.archs("cpu", "vulkan", "metal")
@pytest.mark.parametrize("what", REFUSED)
def test_a_refusal_writes_nothing(arch, rng, what):
    place, change, error, match = REFUSED[what]
    case = Case(rng, arch)
    arrays = [*case.placed, *case.caches, case.offsets]
    arrays[place] = change(arrays[place])
    with pytest.raises(error, match=match) as refusal:
        tikv.append_ragged(*arrays)
    assert str(refusal.value).startswith("append_ragged: ")
    names = ("k_new", "v_new", "k_cache", "v_cache", "cache_offsets")
    plan = tikv.KVCacheAppendPlan.select(describe(case))
    args = tikv.KVCacheAppendArgs(**dict(zip(names, arrays, strict=True)))
    for call in (plan.can_implement, plan.run):
        with pytest.raises(tikv.TikvError, match=f"KVCacheAppendPlan.{call.__name__}: "):
            call(args)
    case.unchanged()


@pytest.mark.archs("cpu", "vulkan", "metal")
def test_memory_that_overlaps_is_refused_at_every_run(arch, rng):
    case = Case(rng, arch, widths=(8, 8))
    plan = tikv.KVCacheAppendPlan.select(describe(case))
    plan.run(case.args())
    case.check()
    case.before = [cache.copy() for cache in case.caches]
    overlapping = tikv.KVCacheAppendArgs(
        k_new=case.placed[0],
        v_new=case.placed[1],
        cache_offsets=case.offsets,
        k_cache=case.caches[0],
        v_cache=case.caches[0],
    )
    for call in (plan.run, plan.can_implement):
        with pytest.raises(tikv.ShapeError, match="overlap"):
            call(overlapping)
    case.unchanged()
    plan.run(case.args())
    case.check()


@pytest.mark.archs("cpu", "vulkan", "metal")
def test_a_plan_converts_nothing(arch, rng):
    case = Case(rng, arch, dtypes=(np.float32, np.float16))
    plan = tikv.KVCacheAppendPlan.select(describe(case))
    with pytest.raises(tikv.DTypeError, match=r"k_cache is f16.* where the descriptor says float32"):
        plan.run(case.args())
    case.unchanged()
