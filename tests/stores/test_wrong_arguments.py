"""Each argument of what changes a store wrong in turn: a `TikvError`, and the store is as before."""

import numpy as np
import oracle
import pytest
from inside import storage_of
from wrong_arguments import (
    HEADS,
    NO_ARRAY,
    NO_LAYOUT,
    NO_ROPE,
    Q_HEADS,
    WIDTH,
    Scene,
    but,
    destination,
    filled,
    index,
    integers,
    of_scores,
    problems_of,
    rows,
)

import tikv
from tikv.stores.layers.contiguous import ContiguousLayers

BATCH = 2
FORMS = {
    "linear": {"dtype": "float16", "page_summaries": 4},
    "ring": {"window": 8, "sinks": 2},
    "int8": {"dtype": "int8"},
    "groups": {"dtype": "q8_0", "head_dim": 32},
    "groups along tokens": {"dtype": tikv.Quant(4, 32, "tokens", 32), "head_dim": 32},
}
INT32, ROTATION = np.int32, tikv.Rope(inv_freq=np.geomspace(1, 1e-3, WIDTH // 2).astype(np.float32))
NO_INDEX = {**but(NO_ARRAY, "None"), "floats": np.zeros(BATCH, np.float32), "long": np.zeros(BATCH + 1, INT32)}
NO_INDEX |= {"two axes": np.zeros((BATCH, 1), INT32)}


def store_of(arch, rng, **form):
    """Two layers of two sequences of 7 tokens."""
    sizes = {"num_layers": 2, "num_kv_heads": HEADS, "head_dim": WIDTH, "capacity": 80, "batch_size": BATCH}
    store = tikv.KVCacheStore(**sizes | {"dtype": "float32"} | form)
    if isinstance(storage_of(store), ContiguousLayers):  # of others, nobody sees the memory
        filled(store, rng)
    for layer in range(2):
        store.append(layer, *(oracle.place(new(rng, store, 7), arch) for _ in "kv"))
    return store


def new(rng, store, tokens, heads=HEADS):
    return rng.standard_normal((BATCH, tokens, heads, store.head_dim)).astype(np.float32)


LAYER = integers(0, 1)
LAYOUT = {**NO_LAYOUT, "the other": "head_major"}


def append(arch, rng, form):
    store = store_of(arch, rng, **form)
    k, v = (new(rng, store, 5) for _ in "kv")
    wrong = rows(k, arch, heads=2, tokens=1)
    right = {"layer": 1, "k": oracle.place(k, arch), "v": oracle.place(v, arch)}
    return Scene(
        store.append, right, [store], {"layer": LAYER, "k": wrong, "v": wrong, "layout": LAYOUT, "positions": NO_INDEX}
    )


def append_all(arch, rng, form):
    store = store_of(arch, rng, **form)
    k, v = (np.stack([new(rng, store, 5)] * 2) for _ in "kv")
    wrong = {**rows(k, arch, heads=3, tokens=2), "a layer missing": oracle.place(k[:1], arch)}
    right = {"k": oracle.place(k, arch), "v": oracle.place(v, arch)}
    return Scene(store.append_all, right, [store], {"k": wrong, "v": wrong, "layout": LAYOUT, "positions": NO_INDEX})


def extend(arch, rng, form):
    store = store_of(arch, rng, **form)
    q, k, v = (new(rng, store, 5, heads) for heads in (Q_HEADS, HEADS, HEADS))
    wrong = rows(k, arch, heads=2, tokens=1)
    right = {"layer": 1, "q": oracle.place(q, arch), "k": oracle.place(k, arch), "v": oracle.place(v, arch)}
    of_arrays = {"layer": LAYER, "q": rows(q, arch, heads=2, tokens=1), "k": wrong, "v": wrong, "layout": LAYOUT}
    return Scene(store.extend, right, [store], of_arrays | of_scores(arch, BATCH, 5))


def extend_uneven(arch, rng, form):
    """After a compaction that left heads of different lengths."""
    scene = extend(arch, rng, form)
    (store,) = scene.changes
    mask = np.ones((BATCH, HEADS, store.held(1)), bool)
    mask[0, 1, :3] = False
    store.compact(1, mask)
    return scene


def attend(arch, rng, form):
    store = store_of(arch, rng, **form)
    q = new(rng, store, 3, Q_HEADS)
    out = oracle.place(np.full(q.shape, 7, np.float32), arch)
    lens = {**but(NO_ARRAY, "None", "a list"), "floats": np.zeros(BATCH, np.float32), "long": np.full(3, 7, INT32)}
    lens |= {"three axes": np.full((BATCH, 1, 1), 7, INT32), "too far": np.full(BATCH, 99, INT32)}
    lens |= {"negative": np.full(BATCH, -1, INT32), "fewer than queries": np.full(BATCH, 2, INT32)}
    wrong = {"layer": LAYER, "q": rows(q, arch, heads=2), "layout": LAYOUT, "out": but(destination(out, arch), "None")}
    wrong |= {
        "impl": NO_LAYOUT,
        "missing": NO_LAYOUT,
        "seq_lens": lens if "window" not in form else but(lens, "too far"),
    }
    right = {"layer": 1, "q": oracle.place(q, arch), "out": out}
    return Scene(store.attend, right, [store, out], wrong | of_scores(arch, BATCH, 3))


def compact(arch, rng, form):
    store = store_of(arch, rng, **form)
    keep = np.array([[[0, 2, 5]] * HEADS] * BATCH)
    wrong = {**index(keep, 7), "falling": keep[..., ::-1], "twice": np.zeros_like(keep), "negative": keep - 1}
    wrong |= {"None": None, "a number": 3, "a short mask": np.ones((BATCH, HEADS, 6), bool)}
    wrong |= {"another batch": keep[:1]}
    ropes = {"rope": {**NO_ROPE, "narrower codes": ROTATION} if store.head_dim != WIDTH else NO_ROPE}
    return Scene(store.compact, {"layer": 1, "keep": keep}, [store], {"layer": LAYER, "keep": wrong} | ropes)


def compact_all(arch, rng, form):
    store = store_of(arch, rng, **form)
    keep = np.array([[[0, 2, 5]] * HEADS] * BATCH)
    wrong = {"one entry": [keep], "the second falls": [keep, keep[..., ::-1]], "the second is a string": [keep, "abc"]}
    wrong |= {"None": None, "a number": 3, "a string": "ab", "the second is far": [keep, keep + 5]}
    return Scene(store.compact_all, {"keep": [keep, keep]}, [store], {"keep": wrong, "rope": NO_ROPE})


def commit(arch, rng, form):
    store = store_of(arch, rng, **form)
    path = np.array([[0, 2]] * BATCH)
    wrong = {**index(path, 7), "falling": path[:, ::-1], "negative": path - 1, "None": None, "a number": 3}
    drafted = but(integers(0, 7), "None") | {"fewer than the path": 2}
    return Scene(store.commit, {"path": path, "drafted": 4}, [store], {"path": wrong, "drafted": drafted})


def reorder(arch, rng, form):
    store = store_of(arch, rng, **form)
    chosen = np.array([1, 0])
    wrong = {**index(chosen, BATCH), "negative": chosen - 1, "None": None, "a number": 3, "short": [0], "empty": []}
    return Scene(store.reorder, {"index": chosen}, [store], {"index": wrong})


def select(arch, rng, form):
    store = store_of(arch, rng, **form)
    wrong = {**index(np.array([1]), BATCH), "negative": [-1], "None": None, "a number": 3, "empty": []}
    return Scene(store.select, {"index": [1]}, [store], {"index": but(wrong, "too long")})


def repeat(arch, rng, form):
    store = store_of(arch, rng, **form)
    return Scene(store.repeat, {"n": 2}, [store], {"n": integers(1)})


def trim(arch, rng, form):
    store = store_of(arch, rng, **form)
    return Scene(store.trim, {"n": 2}, [store], {"n": integers(0, 7)})


def advance(arch, rng, form):
    store = store_of(arch, rng, **form)
    return Scene(
        store.advance, {"tokens": 2}, [store], {"tokens": integers(0) if "window" in form else integers(0, 73)}
    )


def restore(arch, rng, form):
    store = store_of(arch, rng, **form)
    snapshot = store.snapshot()
    store.trim(2)
    other = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=32, capacity=8)
    wrong = {**NO_ARRAY, "of another form": other.snapshot()}
    return Scene(store.restore, {"snapshot": snapshot}, [store], {"snapshot": wrong})


def step(arch, rng, form):
    store = store_of(arch, rng, **form)
    q, k, v = (np.stack([new(rng, store, 1, heads)] * 2) for heads in (Q_HEADS, HEADS, HEADS))
    compiled = tikv.compile_step(store)
    right = {name: oracle.place(a, arch) for name, a in zip("qkv", (q, k, v), strict=True)}
    compiled.prepare(**right)
    wrong = {name: rows(a, arch, heads=3, tokens=2) for name, a in (("k", k), ("v", v))}
    wrong = {name: {**of, "a layer missing": right[name][:1]} for name, of in wrong.items()}
    wrong["q"] = {**rows(q, arch, heads=3), "a layer missing": right["q"][:1]}
    return Scene(compiled.run, right, [store], wrong)


EVERYWHERE = (append, append_all, extend, trim, restore)
SCENES = {f"{make.__name__} of {name}": (make, form) for name, form in FORMS.items() for make in EVERYWHERE}
SCENES |= {
    f"{make.__name__} of {name}": (make, FORMS[name])
    for make in (compact, compact_all, commit, reorder, select, repeat, advance, step)
    for name in ("linear", "ring", "int8")
}
SCENES |= {f"attend of {name}": (attend, FORMS[name]) for name in ("linear", "ring", "int8", "groups")}
SCENES |= {"extend of uneven heads": (extend_uneven, {}), "extend of uneven rings": (extend_uneven, {"window": 8})}


@pytest.mark.archs("cpu", "cuda")
@pytest.mark.parametrize("name", SCENES)
def test_a_wrong_argument_changes_nothing(arch, name):
    make, form = SCENES[name]
    assert problems_of(lambda: make(arch, np.random.default_rng(0), form)) == []
