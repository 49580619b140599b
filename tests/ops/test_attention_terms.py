"""Sink logits, ALiBi's slopes, and masks and trees of new tokens, against the float64 oracle; paths that are kept."""

import itertools

import numpy as np
import oracle
import pytest
from ops.test_attention import NEEDS_TORCH, Case, Pages, assert_close

import tikv
from tikv import reference

pytestmark = pytest.mark.thorough


class Terms:
    """Terms of a case's query heads: a sink far above all scores, one that weighs nothing, and slopes."""

    def __init__(self, rng, case, sinks=True, slopes=None):
        heads = case.q.shape[1]
        self.sink_logits = rng.standard_normal(heads).astype(np.float32) if sinks else None
        if sinks:
            self.sink_logits[:2] = 30.0, -np.inf
        shape = {None: None, "head": (heads,), "sequence": (len(case.lens), heads)}[slopes]
        self.alibi_slopes = None if shape is None else rng.uniform(0.05, 0.5, shape).astype(np.float32)

    def given(self, arch):
        """As arguments: strided, and starting inside an array."""
        found = {}
        for name, a in vars(self).items():
            if a is not None:
                wide = np.full((*a.shape[:-1], 2 * a.shape[-1] + 1), np.nan, np.float32)
                wide[..., 1::2] = a
                found[name] = oracle.place(wide, arch)[..., 1::2] if arch == "cpu" else oracle.place(a, arch)
        return found

    def of(self, b, h, at, position):
        """`reference.attention`'s options for a query at this position, which sees the positions `at`."""
        found = {}
        if self.sink_logits is not None:
            found["sink_logit"] = float(self.sink_logits[h])
        if self.alibi_slopes is not None:
            slopes = self.alibi_slopes if self.alibi_slopes.ndim == 1 else self.alibi_slopes[b]
            found["bias"] = float(slopes[h]) * (np.array(at, float) - position)
        return found


def expected(case, terms, *, softcap=None, **seen):
    """(out, lse, mass of each position) in float64."""
    q = case.q if case.q.ndim == 4 else case.q[:, :, None]
    out, lse = np.zeros((*q.shape[:3], case.v_real.shape[-1])), np.zeros(q.shape[:3])
    mass = np.zeros(case.k_real.shape[:3])
    for b, h, t in itertools.product(*map(range, q.shape[:3])):
        at = reference.visible_positions(case.lens[b], t, q.shape[2], sinks=case.sinks, held=case.ring, **seen)
        added = terms.of(b, h, at, case.lens[b] - q.shape[2] + t)
        keys, values = (a[b, h // case.group, at] for a in (case.k_real, case.v_real))
        wide = np.concatenate([values, np.eye(len(at))], axis=1)  # what each key weighs comes out beside the result
        found, lse[b, h, t] = reference.attention(
            q[b, h, t], keys, wide, scale=q.shape[-1] ** -0.5, softcap=softcap, **added
        )
        out[b, h, t], weights = np.split(found, [values.shape[1]])
        mass[b, h // case.group, at] += weights
    return out.reshape(*case.q.shape[:-1], -1), lse.reshape(case.q.shape[:-1]), mass


@pytest.mark.parametrize(
    ("place", "dtype", "queries", "slopes", "splits"),
    [
        ("linear", "float32", None, None, None),
        ("linear", "float16", 3, "sequence", 3),
        ("ring", "int8", 3, "head", 2),
        ("NHD", "bfloat16", None, "sequence", 2),
    ],
)
def test_sinks_and_slopes(arch, rng, place, dtype, queries, slopes, splits):
    """A sink is counted once however many splits there are, and where a query sees nothing it is all there is."""
    lens = (40, 3, 0, 23)
    form = {"dtype": dtype, "queries": queries, "group": 4 if dtype == "float16" else 2, "lens": lens}
    if place == "ring":
        form |= {"ring": 24, "sinks": 3}
    pages = Pages(rng, layout=place, **form) if place == "NHD" else None
    case = pages.case if pages else Case(rng, **form)
    terms = Terms(rng, case, slopes=slopes)
    got = (pages or case).run(arch, num_splits=splits, **terms.given(arch))
    assert_close(got, expected(case, terms, **({"window": 24} if place == "ring" else {}))[:2], "float32")


def test_slopes_come_after_the_soft_cap_and_without_a_sink(arch, rng):
    case = Case(rng, queries=3, sinks=2, lens=(40, 9))
    terms = Terms(rng, case, sinks=False, slopes="head")
    got = case.run(arch, softcap=2.0, window=9, sinks=2, **terms.given(arch))
    assert_close(got, expected(case, terms, softcap=2.0, window=9)[:2], "float32")


def test_mass_with_sinks(arch, rng):
    """What the sinks weigh is not a key's."""
    case = Case(rng, queries=3, group=2, lens=(40, 3, 24))
    terms = Terms(rng, case)
    arrays = [oracle.place(a, arch) for a in (case.q, case.k, case.v, np.array(case.lens))]
    _, mass = tikv.decode_attention(*arrays, return_mass=True, num_splits=2, **terms.given(arch))
    np.testing.assert_allclose(oracle.to_numpy(mass), expected(case, terms)[2], atol=2e-5)


# How stores hand terms on is the same everywhere; what kernels make of them is tested above.
@pytest.mark.archs("cpu", "cuda")
@pytest.mark.parametrize(("dtype", "window"), [("float32", None), ("float16", 8)])
def test_extend_of_a_store_counts_a_sink_once(arch, rng, dtype, window):
    """Also where a prompt wraps a ring, and what was held and what is new are attended over apart."""
    terms = {
        "sink_logits": rng.standard_normal(4).astype(np.float32),
        "alibi_slopes": rng.uniform(0.1, 0.5, (2, 4)).astype(np.float32),
    }
    form = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 16, "capacity": 40, "batch_size": 2, "dtype": dtype}
    store = tikv.KVCacheStore(**form, window=window, sinks=2 if window else 0)
    whole = tikv.KVCacheStore(**form)
    given = {name: oracle.place(a, arch) for name, a in terms.items()}
    for tokens in (5, 13, 1):
        q, k, v = (rng.standard_normal((2, tokens, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
        q, k, v = (oracle.place(a, arch) for a in (q, k, v))
        out, lse = store.extend(0, q, k, v, return_lse=True, **given)
        whole.append(0, k, v)
        keys, values = (oracle.to_numpy(a).astype(np.float64) for a in whole.tokens(0))
        for b, h, t in itertools.product(range(2), range(4), range(tokens)):
            position = whole.length - tokens + t
            at = reference.visible_positions(whole.length, t, tokens, window=window, sinks=2 if window else 0)
            bias = float(terms["alibi_slopes"][b, h]) * (np.array(at) - position)
            want, want_lse = reference.attention(
                oracle.to_numpy(q)[b, t, h], keys[b, h // 2, at], values[b, h // 2, at], scale=0.25,
                sink_logit=float(terms["sink_logits"][h]), bias=bias,
            )  # fmt: skip
            np.testing.assert_allclose(oracle.to_numpy(out)[b, t, h], want, atol=1e-5)
            np.testing.assert_allclose(oracle.to_numpy(lse)[b, t, h], want_lse, atol=1e-5)
        newest = oracle.place(np.ascontiguousarray(oracle.to_numpy(q)[:, -1]), arch)
        again = store.attend(0, newest, **given)
        np.testing.assert_allclose(oracle.to_numpy(again), oracle.to_numpy(out)[:, -1], atol=1e-5)


@pytest.mark.archs("cpu", "cuda")
def test_a_pool_and_the_layers_take_terms(arch, rng):
    """Of sequences of several lengths, each with slopes of its own; all give what a contiguous cache gives."""
    pool = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=2, head_dim=16, num_blocks=16, block_size=4,
                                  dtype="float32")  # fmt: skip
    seqs, counts = [pool.add() for _ in range(3)], (5, 5, 9)
    q, k, v = (rng.standard_normal((sum(counts), heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    terms = {
        "sink_logits": rng.standard_normal(4).astype(np.float32),
        "alibi_slopes": rng.uniform(0.1, 0.5, (3, 4)).astype(np.float32),
    }
    given = {name: oracle.place(a, arch) for name, a in terms.items()}
    cu = np.cumsum([0, *counts]).tolist()
    out = oracle.to_numpy(pool.extend(0, *(oracle.place(a, arch) for a in (q, k, v)), seqs, cu_seqlens=cu, **given))
    last = np.stack([q[end - 2 : end] for end in cu[1:]])
    got = oracle.to_numpy(pool.attend(0, oracle.place(last, arch), seqs, **given))
    np.testing.assert_allclose(got[:, 1], out[[end - 1 for end in cu[1:]]], atol=1e-5)
    paged = tikv.PagedKVLayer(8, 4, 2, 16, dtype="float32")
    paged.paged_block_indices = [5, 0, 3, 7, 1, 2, 4, 6]
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=16, capacity=40, dtype="float32")
    own = {"sink_logits": given["sink_logits"], "alibi_slopes": oracle.place(terms["alibi_slopes"][2], arch)}
    rows = [oracle.place(np.ascontiguousarray(a[cu[2] :]), arch) for a in (q, k, v)]
    for held in (tikv.ContiguousKVLayer(40, 2, 16, dtype="float32"), paged, store):
        found = held.extend(*rows, **own) if held is not store else held.extend(0, *rows, **own)
        np.testing.assert_allclose(oracle.to_numpy(found), out[cu[2] :], atol=1e-5)
        if held is not store:
            ask = held.paged_decode_attention if held is paged else held.contig_decode_attention
            np.testing.assert_array_equal(oracle.to_numpy(ask(rows[0], **own)), oracle.to_numpy(found))


@pytest.mark.archs("cpu")
def test_a_graph_takes_terms(rng, arch):
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 4, 8), (1, 2, 9, 8), (1, 2, 9, 8)))
    terms = {"sink_logits": np.ones(4, np.float32), "alibi_slopes": np.full(4, 0.5, np.float32)}
    g = tikv.GraphBuilder()
    g.decode_attention("q", "k", "v", 9, sink_logits="s", alibi_slopes="a")
    found = g.compile().run({"q": q, "k": k, "v": v, "s": terms["sink_logits"], "a": terms["alibi_slopes"]})
    np.testing.assert_array_equal(found["out"], tikv.decode_attention(q, k, v, 9, **terms))


def tree_of(rng, tokens, chain=0.5):
    """Parents of a random tree; with a chain, of many that follow one another."""
    return [t - 1 if rng.random() < chain else int(rng.integers(-1, t)) if t else -1 for t in range(tokens)]


def check_tree(case, got, masks, terms, **window):
    """The result of a case whose new tokens see each other by `masks`."""
    out, lse = np.zeros((*case.q.shape[:3], case.v_real.shape[-1])), np.zeros(case.q.shape[:3])
    for b, h, t in itertools.product(*map(range, case.q.shape[:3])):
        at, positions = reference.visible_in_tree(case.lens[b], t, masks[b], **window)
        own = case.lens[b] - case.q.shape[2] + max(int(masks[b][t].sum()) - 1, 0)
        keys, values = (a[b, h // case.group, at] for a in (case.k_real, case.v_real))
        added = terms.of(b, h, positions, own) if terms else {}
        out[b, h, t], lse[b, h, t] = reference.attention(case.q[b, h, t], keys, values, scale=0.25, **added)
    assert_close(got, (out, lse), "float32")


@pytest.mark.parametrize(
    ("place", "dtype", "form", "window", "splits"),
    [
        ("linear", "float32", "parents", {"window": 12, "sinks": 3}, 2),
        ("linear", "float32", "mask", {"window": 12, "sinks": 3}, 2),
        ("NHD", "int8", "bits", {}, None),
    ],
)
def test_masks_and_trees(arch, rng, place, dtype, form, window, splits):
    """More than a word of new tokens, and a window that cuts long branches; any mask, and one that sees nothing new."""
    tokens = 37
    form_of = {"dtype": dtype, "queries": tokens, "lens": (90, tokens, tokens + 2)}
    pages = Pages(rng, layout=place, **form_of) if place == "NHD" else None
    case = pages.case if pages else Case(rng, **form_of, capacity=90, sinks=window.get("sinks", 0))
    terms = Terms(rng, case, slopes="head") if window else None
    parents = np.array([tree_of(rng, tokens, 0.8) for _ in case.lens], np.int32)
    masks = np.stack([reference.tree_mask(p) for p in parents])
    if form == "mask":
        masks[0] = rng.random((tokens, tokens)) < 0.5
        masks[0, 5] = False
    given = {
        "parents": {"parents": oracle.place(parents.astype(np.int64), arch)},
        "mask": {"mask": oracle.to_torch(masks, arch) if arch == "cuda" else masks},
        "bits": {"mask": np.packbits(masks, axis=-1, bitorder="little")},
    }[form]
    if form == "bits" and arch == "cuda":
        given["mask"] = oracle.to_torch(given["mask"], arch)
    got = (pages or case).run(arch, num_splits=splits, **given, **window, **(terms.given(arch) if terms else {}))
    check_tree(case, got, masks, terms, **window)


@pytest.mark.parametrize(
    ("place", "dtype", "width"),
    [
        ("linear", "float16", 48),
        ("NHD", "int8", 48),
        pytest.param("linear", "float16", 576, marks=pytest.mark.full("cpu")),
    ],
)
def test_values_that_are_the_first_columns_of_the_keys(arch, rng, place, dtype, width):
    """Latent attention: all query heads over one head of keys."""
    form = {
        "dtype": dtype,
        "heads": 1,
        "group": 8,
        "width": width,
        "width_v": 32 if width == 48 else 512,
        "lens": (30, 5),
    }
    pages = Pages(rng, layout=place, **form) if place != "linear" else None
    case = pages.case if pages else Case(rng, **form)
    case.v_real = case.k_real[..., : form["width_v"]]
    of = pages or case
    of.v = None
    place = lambda a: None if a is None else oracle.place(a, arch)  # noqa: E731
    options = {"head_dim_v": form["width_v"], "return_lse": True}
    if of.k_scale is not None:
        options["k_scale"] = place(of.k_scale)
    lens = place(np.array(case.lens, np.int32))
    if pages:
        tables = place(pages.table)
        got = tikv.paged_decode_attention(
            place(case.q), place(of.k), None, tables, lens, layout=pages.layout, **options
        )
    else:
        got = tikv.decode_attention(place(case.q), place(of.k), None, lens, **options)
    assert_close([oracle.to_numpy(a).astype(np.float64) for a in got], case.expected(), "float32")


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"head_dim_v": 9}, "head_dim_v=9 is beyond"),
        ({}, "Say how many columns"),
        ({"v": np.zeros((1, 1, 4, 8), np.float32), "head_dim_v": 4}, "Leave head_dim_v out"),
    ],
)
def test_values_that_the_keys_do_not_have_are_refused(change, says, arch):
    q, k = np.zeros((1, 2, 8), np.float32), np.zeros((1, 1, 4, 8), np.float32)
    change = dict(change)
    with pytest.raises(tikv.ShapeError, match=says):
        tikv.decode_attention(q, k, change.pop("v", None), 3, **change)


@pytest.mark.archs("cpu", "cuda")
@pytest.mark.parametrize("window", [None, pytest.param(12, marks=pytest.mark.full)])
def test_a_tree_extends_a_store_and_its_path_is_committed(arch, rng, window):
    """The next token sees what it would have seen had only the path been appended; the memory has those bits."""
    form = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16, "capacity": 64, "dtype": "float32"}
    store, plain = (tikv.KVCacheStore(**form, window=window, sinks=2 if window else 0) for _ in range(2))
    rows = lambda n: [rng.standard_normal((n, heads, 16)).astype(np.float32) for heads in (4, 2, 2)]  # noqa: E731
    place = lambda arrays: [oracle.place(np.ascontiguousarray(a), arch) for a in arrays]  # noqa: E731
    start = rows(4)
    parents = tree_of(rng, 6)
    tree = oracle.place(np.array([parents], np.int32), arch)
    path = [t for t in range(6) if reference.tree_mask(parents)[5, t]]
    for layer in range(2):
        draft = rows(6)
        for s in (store, plain):
            s.extend(layer, *place(start))
        out = oracle.to_numpy(store.extend(layer, *place(draft), parents=tree))
        kept = [a[path] for a in draft]
        want = oracle.to_numpy(plain.extend(layer, *place(kept)))
        np.testing.assert_allclose(out[path], want, atol=1e-5)
        again = store.attend(layer, oracle.place(draft[0], arch), parents=tree)
        np.testing.assert_allclose(oracle.to_numpy(again), out, atol=1e-5)
    store.commit(path)
    assert store.length == plain.length
    for layer in range(2):
        for a, b in zip(store.tokens(layer), plain.tokens(layer), strict=True):
            assert oracle.to_numpy(a).tobytes() == oracle.to_numpy(b).tobytes()


@pytest.mark.archs("cpu", "cuda")
def test_a_tree_that_wraps_a_ring_attends_over_what_was_held_and_what_is_new(arch, rng):
    """`extend` reads both apart; each query sees the sinks, its window by depth, and its ancestors."""
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=16, capacity=8, dtype="float32", window=8, sinks=2)
    rows = lambda n: [rng.standard_normal((n, heads, 16)).astype(np.float32) for heads in (4, 2, 2)]  # noqa: E731
    (q0, k0, v0), (q, k, v) = rows(11), rows(6)
    parents = [-1, 0, 1, 0, 2, 4]
    mask = reference.tree_mask(parents)
    store.extend(0, *(oracle.place(a, arch) for a in (q0, k0, v0)))
    tree = oracle.place(np.array([parents], np.int32), arch)
    out = oracle.to_numpy(store.extend(0, *(oracle.place(a, arch) for a in (q, k, v)), parents=tree))
    keys, values = (np.concatenate(a).astype(np.float64) for a in ((k0, k), (v0, v)))
    for t, h in itertools.product(range(6), range(4)):
        at, _ = reference.visible_in_tree(17, t, mask, window=8, sinks=2)
        want, _ = reference.attention(q[t, h], keys[at, h // 2], values[at, h // 2], scale=0.25)
        np.testing.assert_allclose(out[t, h], want, atol=1e-5)
    before = [oracle.to_numpy(a).tobytes() for a in store.tokens(0)]
    with pytest.raises(tikv.PositionError, match="slides"):
        store.commit([0, 1, 2])
    with pytest.raises(tikv.PositionError, match="does not continue the path"):
        store.commit(range(6))
    assert [oracle.to_numpy(a).tobytes() for a in store.tokens(0)] == before


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("tree", "error", "says"),
    [
        ({"mask": np.ones((1, 3, 2), bool)}, tikv.ShapeError, r"\(B, T, T\) = \(1, 3, 3\)"),
        ({"mask": np.ones((1, 3, 2), np.uint8)}, tikv.ShapeError, r"ceil\(T / 8\)\) = \(1, 3, 1\)"),
        ({"mask": np.ones((1, 3, 3), np.float32)}, tikv.DTypeError, "float32; it must be bool"),
        ({"parents": [[-1, 1, 0]]}, tikv.PositionError, r"parents\[0, 1\]=1"),
        ({"parents": [[0, 0, 0]]}, tikv.PositionError, r"parents\[0, 0\]=0"),
        ({"parents": [[-2, 0, 0]]}, tikv.PositionError, r"parents\[0, 0\]=-2"),
        ({"parents": [[-1, 0]]}, tikv.ShapeError, r"\(B, T\) = \(1, 3\)"),
        ({"parents": [[-1, 0, 0]], "mask": np.ones((1, 3, 3), bool)}, tikv.OptionError, "one of them"),
        ({"parents": [[-1, 0, 0]], "causal": False}, tikv.OptionError, "causal"),
        ({"parents": [[-1, 0, 0]], "return_mass": True}, tikv.OptionError, "return_mass"),
        ({"parents": [[-1, 0, 0]], "ring": True, "window": 2}, tikv.CapacityError, "3 new tokens"),
    ],
)
def test_trees_that_are_none_are_refused(tree, error, says, arch):
    k, v = np.zeros((2, 1, 2, 9, 8), np.float32)
    q, out = np.zeros((1, 4, 3, 8), np.float32), np.full((1, 4, 3, 8), 7, np.float32)
    with pytest.raises(error, match=says):
        tikv.decode_attention(q, k, v, 9, out=out, **tree)
    assert (out == 7).all()
    if len(tree) == 1:
        store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=8, capacity=9, dtype="float32")
        with pytest.raises(error, match=says):
            store.extend(0, *(np.zeros((3, n, 8), np.float32) for n in (4, 2, 2)), **tree)
        assert store.length == 0


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("path", "drafted", "error", "says"),
    [
        ([[0, 2, 1]], None, tikv.PositionError, r"path\[0, 2\]=1"),
        ([[0, 3]], None, tikv.PositionError, r"path\[0, 1\]=3"),
        ([[-1, 0]], None, tikv.PositionError, r"path\[0, 0\]=-1"),
        ([[0], [1]], None, tikv.ShapeError, r"\(1, n\)"),
        ([[0.5]], None, tikv.ShapeError, "integers"),
        ([0], 6, tikv.PositionError, "drafted=6"),
    ],
)
def test_paths_that_are_none_are_refused(path, drafted, error, says, arch):
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=2, capacity=9, dtype="float32")
    for n in (2, 3):
        rows = np.arange(2 * n, dtype=np.float32).reshape(n, 1, 2)
        store.append(0, rows, rows)
    before = [a.numpy().tobytes() for a in store.tokens(0)]
    with pytest.raises(error, match=says):
        store.commit(path, drafted)
    assert [a.numpy().tobytes() for a in store.tokens(0)] == before
    store.trim(1)
    with pytest.raises(tikv.PositionError, match="Pass the number of drafted tokens as drafted="):
        store.commit([0])
    store.commit([1], drafted=2)
    assert store.tokens(0)[0].numpy().ravel().tolist() == [0, 1, 2, 3, 2, 3]


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("terms", "error", "says"),
    [
        ({"sink_logits": np.zeros(3, np.float32)}, tikv.ShapeError, r"f32\[3\].*\(Hq,\) = \(4,\)"),
        ({"sink_logits": np.zeros(4, np.float16)}, tikv.DTypeError, "float32"),
        ({"alibi_slopes": np.zeros((3, 4), np.float32)}, tikv.ShapeError, r"\(4,\) or \(2, 4\)"),
        ({"alibi_slopes": np.zeros(4, np.float64)}, tikv.DTypeError, "float32"),
        ({"alibi_slopes": np.zeros(4, np.float32), "return_mass": True}, tikv.OptionError, "return_mass"),
        pytest.param(
            {"sink_logits": np.zeros(4, np.float32), "impl": "torch"},
            tikv.OptionError,
            "sink_logits is not passed on to torch",
            marks=NEEDS_TORCH,
        ),
    ],
)
def test_terms_that_do_not_fit_are_refused(terms, error, says, arch):
    k, v = np.zeros((2, 2, 2, 9, 8), np.float32)
    out = np.full((2, 4, 8), 7, np.float32)
    with pytest.raises(error, match=says) as caught:
        tikv.decode_attention(np.zeros((2, 4, 8), np.float32), k, v, 9, out=out, **terms)
    assert str(caught.value).startswith("decode_attention: ")
    assert (out == 7).all()
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=8, capacity=9, batch_size=2, dtype="float32")
    if len(terms) == 1:
        with pytest.raises(error, match=says):
            store.extend(0, *(np.zeros((2, 3, n, 8), np.float32) for n in (4, 2, 2)), **terms)
        assert store.length == 0
        pool = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=2, head_dim=8, num_blocks=9, dtype="float32")
        seqs = [pool.add(), pool.add()]
        with pytest.raises(error, match=says):
            pool.extend(0, *(np.zeros((2, n, 8), np.float32) for n in (4, 2, 2)), seqs, **terms)
        assert pool.length(seqs[0]) == 0
