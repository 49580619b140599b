"""Each argument of what changes a pool wrong in turn: a `TikvError`, and pools, tables and free lists are as before."""

import numpy as np
import oracle
import pytest
from wrong_arguments import (
    HEADS,
    NO_ARRAY,
    NO_INTEGER,
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

FORMS = {
    "float16": {"dtype": "float16"},
    "int8 HND": {"dtype": "int8", "layout": "HND"},
    "VLLM": {"dtype": "float32", "layout": "VLLM"},
    "groups": {"dtype": "q8_0", "head_dim": 32},
    "heads": {"dtype": "float32", "per_head": True},
}
INT32 = np.int32
STARTS = [0, 3, 4]
LAYER = integers(0, 1)
WINDOW = {**but(NO_INTEGER, "None"), "zero": 0, "negative": -1}


def pool_of(arch, rng, **form):
    """Two layers; a sequence of 9 tokens, one of 3, a fork of the first where that may be, and one that was freed."""
    sizes = {"num_layers": 2, "num_kv_heads": HEADS, "head_dim": WIDTH, "num_blocks": 32, "block_size": 4}
    pool = filled(tikv.PagedKVCacheStore(**sizes | form), rng)
    a, gone, b = pool.add(None if pool.config.per_head else range(9)), pool.add(), pool.add()
    pool.free(gone)
    for layer in range(2):
        k, v = (oracle.place(new(rng, pool, 12), arch) for _ in "kv")
        pool.append(layer, k, v, [a, b], [0, 9, 12])
    if not pool.config.per_head:
        pool.fork(a)
    return pool


def new(rng, pool, tokens, heads=HEADS):
    return rng.standard_normal((tokens, heads, pool.head_dim)).astype(np.float32)


A, GONE, B = 0, 1, 2
SEQS = {
    "None": None,
    "a number": 0,
    "a string": "02",
    "empty": [],
    "freed": [A, GONE],
    "never added": [A, 99],
    "negative": [A, -1],
    "twice": [A, A],
    "fractions": [0.0, 2.0],
    "huge": [A, 10**30],
    "nested": [[A], [B]],
    "uneven": [[A], [A, B]],
    "one more": [A, B, 3],
}
CU_SEQLENS = {
    "None": None,
    "a number": 4,
    "a string": "034",
    "short": [0, 4],
    "long": [0, 3, 4, 4],
    "falling": [0, 4, 3],
    "negative": [-1, 3, 4],
    "beyond the rows": [0, 3, 5],
    "not from 0": [1, 3, 4],
    "fractions": [0.0, 3.0, 4.0],
    "huge": [0, 3, 10**30],
    "nested": [[0, 3, 4]],
}


def append(arch, rng, form):
    pool = pool_of(arch, rng, **form)
    k, v = (new(rng, pool, 4) for _ in "kv")
    wrong = rows(k, arch, heads=1)
    right = {"layer": 1, "k": oracle.place(k, arch), "v": oracle.place(v, arch), "seqs": [A, B], "cu_seqlens": STARTS}
    given = {
        "layer": LAYER,
        "k": {**wrong, "short": k[:3]},
        "v": {**wrong, "short": k[:3]},
        "seqs": SEQS,
        "cu_seqlens": CU_SEQLENS,
    }
    return Scene(pool.append, right, [pool], given)


def append_of_its_own_rows(arch, rng, form):
    """Rows that lie in the pool, by a step that has to copy a shared block first."""
    pool = pool_of(arch, rng, **form)
    k, v = (oracle.place(new(rng, pool, 4).astype(np.float16), arch) for _ in "kv")
    right = {"layer": 1, "k": k, "v": v, "seqs": [A, B], "cu_seqlens": STARTS}
    return Scene(pool.append, right, [pool], {name: {"of the pool": pool.keys(1)[0]} for name in "kv"})


def extend(arch, rng, form):
    pool = pool_of(arch, rng, **form)
    q, k, v = (new(rng, pool, 4, heads) for heads in (Q_HEADS, HEADS, HEADS))
    wrong = {**rows(k, arch, heads=1), "short": k[:3]}
    right = {"layer": 1, "q": oracle.place(q, arch), "k": oracle.place(k, arch), "v": oracle.place(v, arch)}
    right |= {"seqs": [A, B], "cu_seqlens": STARTS}
    given = {"layer": LAYER, "q": {**rows(q, arch, heads=1), "short": q[:3]}, "k": wrong, "v": wrong, "seqs": SEQS}
    return Scene(
        pool.extend, right, [pool], given | {"cu_seqlens": CU_SEQLENS, "window": WINDOW} | of_scores(arch, 2, 4)
    )


def extend_a_tree(arch, rng, form):
    """Of two tokens each, whose parents are given."""
    pool = pool_of(arch, rng, **form)
    q, k, v = (oracle.place(new(rng, pool, 4, heads), arch) for heads in (Q_HEADS, HEADS, HEADS))
    right = {
        "layer": 1,
        "q": q,
        "k": k,
        "v": v,
        "seqs": [A, B],
        "cu_seqlens": [0, 2, 4],
        "parents": np.array([[-1, 0]] * 2, INT32),
    }
    wrong = {
        "cu_seqlens": CU_SEQLENS | {"uneven": STARTS},
        "seqs": SEQS,
        "parents": but(of_scores(arch, 2, 2)["parents"], "a list"),
    }
    return Scene(pool.extend, right, [pool], wrong)


def attend(arch, rng, form):
    pool = pool_of(arch, rng, **form)
    q = rng.standard_normal((2, 3, Q_HEADS, pool.head_dim)).astype(np.float32)
    out = oracle.place(np.full(q.shape, 7, np.float32), arch)
    wrong = {
        "layer": LAYER,
        "q": rows(q, arch, heads=2),
        "seqs": but(SEQS, "twice"),
        "out": but(destination(out, arch), "None"),
    }
    wrong |= {
        "layout": {**NO_LAYOUT, "the other": "head_major"},
        "impl": {**NO_LAYOUT, "torch": "torch"},
        "window": WINDOW,
    }
    right = {"layer": 1, "q": oracle.place(q, arch), "seqs": [A, B], "out": out}
    return Scene(pool.attend, right, [pool, out], wrong | of_scores(arch, 2, 3))


def write_qkv(arch, rng, form):
    pool = pool_of(arch, rng, **form)
    qkv = rng.standard_normal((4, (Q_HEADS + 2 * HEADS) * WIDTH)).astype(np.float32)
    tables = rng.standard_normal((2, 16, WIDTH // 2)).astype(np.float32)
    how = tikv.NormRope(mode="half", cos=tables[0], sin=tables[1])
    short = tikv.NormRope(mode="half", cos=tables[0, :11], sin=tables[1, :11])
    narrow = tikv.NormRope(mode="half", cos=tables[0, :, 1:], sin=tables[1, :, 1:])
    right = {
        "layer": 1,
        "qkv": oracle.place(qkv, arch),
        "seqs": [A, B],
        "cu_seqlens": STARTS,
        "num_q_heads": Q_HEADS,
        "norm_rope": how,
    }
    wrong = {"layer": LAYER, "qkv": rows(qkv, arch) | {"short": qkv[:3]}, "seqs": SEQS, "cu_seqlens": CU_SEQLENS}
    wrong |= {"num_q_heads": integers(1) | {"other": 3}, "q_layout": NO_LAYOUT}
    wrong |= {"norm_rope": {**but(NO_ARRAY, "None"), "short tables": short, "narrow tables": narrow}}
    positions = np.array([9, 10, 11, 3], INT32)
    of_positions = {**index(positions, 16), "negative": positions - 10, "a number": 3, "short": positions[:3]}
    return Scene(pool.write_qkv, right, [pool], wrong | {"rope_positions": of_positions})


def compact(arch, rng, form):
    pool = pool_of(arch, rng, **form)
    keep = np.array([0, 3, 4, 8])
    wrong = {**index(keep, 9), "falling": keep[::-1], "negative": keep - 1, "None": None, "a number": 3}
    wrong |= {"a short mask": np.ones(8, bool), "another head": np.stack([keep] * 3)}
    ropes = {**NO_ROPE} if pool.head_dim == WIDTH else NO_ROPE
    return Scene(
        pool.compact,
        {"layer": 1, "seq": A, "keep": keep},
        [pool],
        {"layer": LAYER, "seq": SEQ, "keep": wrong, "rope": ropes},
    )


SEQ = {**NO_INTEGER, "freed": GONE, "never added": 99, "negative": -1, "huge": 10**30}


def commit(arch, rng, form):
    pool = pool_of(arch, rng, **form)
    k = oracle.place(new(rng, pool, 6), arch)
    for layer in range(2):
        pool.append(layer, k, k, [A, B], [0, 4, 6])
    path = [[0, 2], [1]]
    wrong = {
        "None": None,
        "a number": 3,
        "a string": "01",
        "one": [[0, 2]],
        "falling": [[2, 0], [1]],
        "negative": [[-1], [1]],
    }
    wrong |= {"beyond": [[0, 4], [1]], "fractions": [[0.0], [1]], "strings": [["a"], [1]], "nested": [[[0]], [1]]}
    drafted = but(integers(0), "None") | {"fewer than the path": 2, "more than there are": 8}
    right = {"seqs": [A, B], "path": path}
    return Scene(
        pool.commit, right, [pool], {"seqs": but(SEQS, "one more") | {"one": [A]}, "path": wrong, "drafted": drafted}
    )


def fork(arch, rng, form):
    pool = pool_of(arch, rng, **form)
    return Scene(pool.fork, {"seq": A}, [pool], {"seq": SEQ})


def truncate(arch, rng, form):
    pool = pool_of(arch, rng, **form)
    return Scene(pool.truncate, {"seq": A, "n": 6}, [pool], {"seq": SEQ, "n": integers(0, 9)})


def free(arch, rng, form):
    pool = pool_of(arch, rng, **form)
    return Scene(pool.free, {"seq": A}, [pool], {"seq": SEQ})


def swap_out(arch, rng, form):
    pool = pool_of(arch, rng, **form)
    return Scene(pool.swap_out, {"seq": A}, [pool], {"seq": SEQ})


def swap_in(arch, rng, form):
    pool = pool_of(arch, rng, **form)
    pool.swap_out(A)
    return Scene(pool.swap_in, {"seq": A}, [pool], {"seq": {**SEQ, "not swapped out": B}})


def add(arch, rng, form):
    pool = pool_of(arch, rng, **form)
    ids = but(index(np.arange(9)), "too long", "an axis more") | {"nested": [[1]], "a number": 3}
    return Scene(
        pool.add,
        {"token_ids": list(range(6))},
        [pool],
        {"token_ids": ids, "salt": {"a list": [1], "a fraction": 1.5, "a bool": True}},
    )


EVERYWHERE = (append, extend, attend)
SCENES = {f"{make.__name__} of {name}": (make, form) for name, form in FORMS.items() for make in EVERYWHERE}
SCENES |= {
    f"{make.__name__} of {name}": (make, FORMS[name])
    for make, names in (
        (append_of_its_own_rows, ("float16",)),
        (extend_a_tree, ("float16", "heads")),
        (write_qkv, ("float16", "int8 HND", "VLLM")),
        (compact, ("float16", "int8 HND", "heads")),
        (commit, ("float16", "int8 HND", "heads")),
        (fork, ("float16",)),
        (truncate, ("float16", "heads")),
        (free, ("float16", "heads")),
        (swap_out, ("float16",)),
        (swap_in, ("float16",)),
        (add, ("float16",)),
    )
    for name in names
}


@pytest.mark.archs("cpu", "cuda")
@pytest.mark.parametrize("name", SCENES)
def test_a_wrong_argument_changes_nothing(arch, name):
    make, form = SCENES[name]
    assert problems_of(lambda: make(arch, np.random.default_rng(0), form)) == []
