"""`compact`: whole caches as raw bits, in place and into another array, by indices and by masks; every refusal."""

import ml_dtypes
import numpy as np
import oracle
import pytest

import tikv
from tikv import arrays, reference
from tikv.arrays import CacheArray, to_device
from tikv.ops import compact

BF16 = ml_dtypes.bfloat16
SHAPE = (2, 3, 40)  # sequences, heads, rows


def kept(rng, shape, count):
    """Ascending indices, `count` for each of the leading axes."""
    return np.sort(rng.random(shape).argsort(axis=-1)[..., :count], axis=-1)


class Case:
    """A cache full of random bits between guards, and an output alike, as the back end takes them."""

    def __init__(self, rng, arch, dtype=np.float16, width=8, shape=SHAPE):
        self.before, self.out_before = (oracle.random_bits(rng, (*shape, width), dtype) for _ in range(2))
        self.guarded = [oracle.Guarded(rng, a) for a in (self.before, self.out_before)]
        self.cache, self.out = (oracle.place(g.array, arch) for g in self.guarded)

    def check(self, keep, **options):
        """Keep in place and into `out`, and compare both with the reference."""
        want = self.before if self.before.size == 0 else reference.compact(self.before, np.asarray(keep))
        assert tikv.compact(self.cache, keep, out=self.out, **options) is self.out
        into = self.out_before.copy()
        for place in np.ndindex(into.shape[:2]):
            chosen = np.asarray(keep)[place[: np.asarray(keep).ndim - 1]]
            count = int(chosen.sum()) if chosen.dtype == bool else len(chosen)
            into[place][:count] = want[place][:count]
        oracle.assert_same_bits(self.cache, self.before, what="what is only read")
        oracle.assert_same_bits(self.out, into, what="out")
        assert tikv.compact(self.cache, keep, **options) is self.cache
        oracle.assert_same_bits(self.cache, want, what="in place")
        for guarded in self.guarded:
            guarded.check()


@pytest.mark.parametrize(
    ("dtype", "width"),
    [(np.float16, 8), (BF16, 3), (np.float32, 40), (np.int8, 5), (np.float64, 2)],
    ids=["f16", "bf16-odd", "f32-wide", "int8-odd", "f64"],
)
def test_indices_of_each_head(arch, rng, dtype, width):
    if dtype is np.float64 and arch not in ("cpu", "cuda"):
        pytest.skip("there is no float64 on this back end")
    for count in (40, 17, 1, 0):
        Case(rng, arch, dtype, width).check(kept(rng, SHAPE, count))


def test_one_list_serves_all_heads_of_a_sequence(arch, rng):
    for index in (np.int32, np.int64):
        Case(rng, arch).check(kept(rng, (2, 40), 21).astype(index))
    Case(rng, arch).check([[0, 3, 39], [1, 2, 38]])


def test_a_mask_keeps_as_many_as_it_likes(arch, rng):
    mask = rng.random(SHAPE) < np.array([0.1, 0.5, 0.9])[:, None]
    mask[0, 0], mask[1, 2] = False, True
    Case(rng, arch).check(mask)
    Case(rng, arch).check(mask[:, 1])
    Case(rng, arch).check(mask[:, 0].tolist())


def test_many_rows_are_moved_in_many_turns(arch, rng):
    Case(rng, arch, np.float16, 4, (1, 2, 1200)).check(kept(rng, (1, 2, 1200), 1111))


@pytest.mark.archs("vulkan", "metal", "cuda")
def test_threads_may_share_a_heads_rows(arch, rng, monkeypatch):
    """The form for CUDA runs everywhere: words in parts, threads that are over, more turns than one."""
    monkeypatch.setattr(compact, "shares_rows", lambda live: arch != "cuda")
    for width, rows in ((8, 1200), (300, 70)):
        Case(rng, arch, np.float16, width, (1, 2, rows)).check(kept(rng, (1, 2, rows), rows * 3 // 4))


def test_strided_caches_are_used_in_place(arch, rng):
    layers, token_major = (oracle.random_bits(rng, s, np.float16) for s in ((2, 4, 3, 9, 8), (2, 9, 3, 8)))
    keep = kept(rng, (2, 3, 9), 5)
    placed = [oracle.place(a.copy(), arch) for a in (layers, token_major)]
    outs = [oracle.place(np.zeros((2, 9, 3, 8), np.float16), arch) for _ in range(2)]
    for cache, out, before in (
        (placed[0][:, 2], outs[0].swapaxes(1, 2), layers[:, 2]),
        (placed[1].swapaxes(1, 2), outs[1].swapaxes(1, 2), token_major.swapaxes(1, 2)),
    ):
        want = reference.compact(before, keep)
        tikv.compact(cache, keep, out=out)
        oracle.assert_same_bits(oracle.to_numpy(out)[:, :, :5], want[:, :, :5])
        tikv.compact(cache, keep)
        oracle.assert_same_bits(cache, want)
    layers[:, 2] = reference.compact(layers[:, 2], keep)
    oracle.assert_same_bits(placed[0], layers, what="the layers around it")
    strided = np.repeat(keep, 2, axis=-1)[..., ::2]
    cache = oracle.place(token_major.swapaxes(1, 2).copy(), arch)
    oracle.assert_same_bits(tikv.compact(cache, strided), reference.compact(token_major.swapaxes(1, 2), keep))


def test_an_extent_of_zero_is_a_success(arch, rng):
    for axis in range(3):
        shape = [2, 3, 4]
        shape[axis] = 0
        Case(rng, arch, shape=tuple(shape)).check(np.zeros((*shape[:2], 0), np.int64))


def test_lengths_bound_what_is_kept(arch, rng):
    case = Case(rng, arch)
    case.check(kept(rng, (2, 3, 10), 4), lengths=[10, 40])
    case = Case(rng, arch)
    case.check(kept(rng, (2, 3, 10), 4), lengths=10)
    mask = np.zeros(SHAPE, bool)
    mask[:, :, :12] = True
    Case(rng, arch).check(mask, lengths=np.full((2, 3), 12))


@pytest.mark.archs("vulkan", "cuda", "metal")
def test_indices_that_only_the_device_knows_to_be_outside_are_left_out(arch, rng):
    case = Case(rng, arch)
    keep = kept(rng, SHAPE, 20)
    wrong = keep.copy()
    wrong[:, :, 5], wrong[:, :, 19] = -1, 40
    live = arrays.runtime_of()
    index = CacheArray(to_device(wrong, live), live)
    want = reference.compact(case.before, keep)
    want[:, :, [5, 19]] = case.before[:, :, [5, 19]]
    tikv.compact(case.cache, index)
    oracle.assert_same_bits(case.cache, want)
    case.guarded[0].check()


def put(keep, at, value):
    changed = np.array(keep)
    changed[at] = value
    return changed


GOOD = np.tile(np.arange(0, 8, 2), (2, 3, 1))
MASK = np.ones((2, 3, 8), bool)
REFUSED = [
    (put(GOOD, (1, 2, 3), 4), {}, tikv.PositionError, "keep of sequence 1, head 2 has 4 after 4, at index 3"),
    (put(GOOD, (0, 1, 1), 7), {}, tikv.PositionError, "keep of sequence 0, head 1 has 4 after 7, at index 2"),
    (put(GOOD, (0, 1, 0), -1), {}, tikv.PositionError, r"head 1 has -1, and 8 rows are held there. Use 0\.\.7"),
    (put(GOOD, (1, 0, 3), 8), {}, tikv.PositionError, "head 0 has 8, and 8 rows are held"),
    (GOOD[:, 0] * 2, {}, tikv.PositionError, "keep of sequence 0 has 12, and 8 rows"),
    (GOOD, {"lengths": [7, 6]}, tikv.PositionError, "keep of sequence 1, head 0 has 6, and 6 rows"),
    (GOOD[:, 0], {"lengths": [[7, 7, 7], [9, 7, 6]]}, tikv.PositionError, "lengths has 9 for a cache of 8 rows"),
    (GOOD[:, 0], {"lengths": [[7, 7, 7], [8, 7, 6]]}, tikv.PositionError, "sequence 1 has 6, and 6 rows"),
    (MASK, {"lengths": 7}, tikv.PositionError, "the mask keeps row 7 of sequence 0, head 0, which holds 7"),
    (MASK[..., :7], {}, tikv.ShapeError, r"a mask of shape \(2, 3, 7\), but each head has 8"),
    (MASK[:1], {}, tikv.ShapeError, r"a mask of shape \(1, 3, 8\) where \(2, 3, 8\)"),
    (
        np.tile(np.arange(9), (2, 1)),
        {},
        tikv.ShapeError,
        r"indices of shape \(2, 9\), but each head has 8 rows. Pass at most 8",
    ),
    (np.arange(4), {}, tikv.ShapeError, r"indices of shape \(4,\) where \(2, 3, n\)"),
    ([[1, 2], [3]], {}, tikv.ShapeError, r"a list that cannot become an array: .*[^.]\. Pass rows of equal length"),
    (GOOD.astype(np.float32), {}, tikv.DTypeError, "keep is f32"),
    (GOOD[..., ::-1], {}, tikv.ShapeError, "negative strides"),
    (GOOD, {"lengths": [8, 8, 8]}, tikv.ShapeError, r"lengths is i64\[3\] where \(2,\) or \(2, 3\)"),
    (GOOD, {"lengths": 9}, tikv.PositionError, r"lengths=9 is outside 0\.\.8"),
    (GOOD, {"out": np.zeros((2, 3, 3, 4), np.float16)}, tikv.ShapeError, "the number of rows of out is 3 where 4"),
    (GOOD, {"out": np.zeros((2, 2, 4, 4), np.float16)}, tikv.ShapeError, "the number of heads of out is 2"),
    (GOOD, {"out": np.zeros((2, 3, 4, 4), np.float32)}, tikv.DTypeError, "dtype"),
]


@pytest.mark.archs("cpu", "vulkan")
@pytest.mark.parametrize(("keep", "options", "error", "match"), REFUSED, ids=range(len(REFUSED)))
def test_refused_calls_change_nothing(arch, rng, keep, options, error, match):
    case = Case(rng, arch, width=4, shape=(2, 3, 8))
    with pytest.raises(error, match=f"^compact: .*{match}"):
        tikv.compact(case.cache, keep, **options)
    oracle.assert_same_bits(case.cache, case.before)


@pytest.mark.archs("cpu")
def test_refused_arrays(arch, rng):
    case = Case(rng, arch, width=4, shape=(2, 3, 8))
    read_only = case.before.copy()
    read_only.flags.writeable = False
    for cache, options, error, match in (
        (read_only, {}, tikv.ShapeError, "read-only"),
        (case.cache[0], {}, tikv.ShapeError, "must be"),
        (np.broadcast_to(case.before[:, :1], (2, 3, 8, 4)), {}, tikv.ShapeError, "read-only"),
        (case.cache, {"out": case.cache}, tikv.ShapeError, "overlap"),
    ):
        with pytest.raises(error, match=match):
            tikv.compact(cache, GOOD, **options)
    oracle.assert_same_bits(case.cache, case.before)


@pytest.mark.parametrize("name", ["quant4_32", "q8_0"])
def test_codes_move_with_their_scales(arch, rng, name):
    """In place and into other codes; those of rows behind the last kept stay."""
    keep, mask = kept(rng, SHAPE, 11), rng.random(SHAPE[:1] + SHAPE[2:]) < 0.5
    rows = rng.standard_normal((2, *SHAPE, 64)).astype(np.float32)
    for chosen in (keep, mask):
        cache, out = (tikv.quantize(oracle.place(x, arch), name) for x in rows)
        before, old = ([oracle.to_numpy(a).copy() for a in q[:3] if a is not None] for q in (cache, out))
        assert tikv.compact(cache, chosen, out=out) is out
        assert tikv.compact(cache, chosen) is cache
        for i, (a, b) in enumerate(zip(before, old, strict=True)):
            want, into = reference.compact(a, chosen), b.copy()
            for place in np.ndindex(SHAPE[:2]):
                one = chosen[place[: chosen.ndim - 1]]
                count = int(one.sum()) if one.dtype == bool else len(one)
                into[place][:count] = want[place][:count]
            oracle.assert_same_bits(oracle.to_numpy(cache[i]), want, what="in place")
            oracle.assert_same_bits(oracle.to_numpy(out[i]), into, what="out")


@pytest.mark.archs("cpu")
def test_refused_codes(arch, rng):
    rows = rng.standard_normal((2, 3, 8, 64)).astype(np.float32)
    cache, flat = tikv.quantize(rows, "q8_0"), tikv.quantize(rows[0], "q8_0")
    before = [oracle.to_numpy(a).copy() for a in cache[:2]]
    apart = tikv.quantize(rows, "quant4_32")
    apart = apart._replace(scales=oracle.to_numpy(apart.scales).copy(), biases=oracle.to_numpy(apart.biases).copy())
    for given, options, error, match in (
        (cache, {"out": rows}, tikv.DTypeError, "the cache holds q8_0, but out holds plain rows"),
        (rows, {"out": cache}, tikv.DTypeError, "the cache holds plain rows, but out holds q8_0"),
        (cache, {"out": tikv.quantize(rows, "q4_0")}, tikv.DTypeError, "the cache holds q8_0, but out holds q4_0"),
        (cache, {"out": tikv.quantize(rows[:, :, :3], "q8_0")}, tikv.ShapeError, "rows of out's codes is 3 where 4"),
        (flat, {}, tikv.ShapeError, "with 3 axes; it must be"),
        (apart, {}, tikv.ShapeError, "the scale and the bias of a group are written together"),
        (cache, {"out": cache}, tikv.ShapeError, "overlap"),
    ):
        with pytest.raises(error, match=match):
            tikv.compact(given, GOOD, **options)
    for a, b in zip(cache, before, strict=False):
        oracle.assert_same_bits(oracle.to_numpy(a), b)


def test_torch_tensors_and_their_masks(arch, rng):
    pytest.importorskip("torch")
    if arch not in ("cpu", "cuda"):
        pytest.skip("torch has no view of memory on this back end")
    before = oracle.random_bits(rng, (2, 3, 40, 8), np.float16)
    keep, mask = kept(rng, SHAPE, 11), rng.random(SHAPE) < 0.5
    for given in (keep, mask):
        cache, chosen = (oracle.to_torch(a.copy(), arch) for a in (before, given))
        oracle.assert_same_bits(tikv.compact(cache, chosen), reference.compact(before, given))
