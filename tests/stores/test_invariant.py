"""Stores under ``tikv.init(invariant=True)``: a token attends with the same bits however its prompt came."""

import numpy as np
import oracle
import pytest
from invariance import invariant, same

import tikv

pytestmark = pytest.mark.thorough

KEYS, WIDTH, TOKENS = 128, 64, 200
SINKS = np.array([0.5, -1, 3, 0.1], np.float32)


def rows_of(rng, batch=1, tokens=TOKENS, dtype=np.float32):
    """q, k and v, token-major."""
    shapes = (batch, tokens, 4, WIDTH), (batch, tokens, 2, WIDTH), (batch, tokens, 2, WIDTH)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def store_of(batch, tokens, config):
    sizes = {"num_layers": 1, "num_kv_heads": 2, "head_dim": WIDTH, "batch_size": batch, "capacity": tokens + 8}
    return tikv.KVCacheStore(**sizes, **config)


def extended(arch, rows, config, chunks, **options):
    """(out, lse) of all tokens of a prompt, brought in chunks."""
    store, first, found = store_of(rows[0].shape[0], rows[0].shape[1], config), 0, []
    for tokens in chunks:
        some = [oracle.place(np.ascontiguousarray(a[:, first : first + tokens]), arch) for a in rows]
        first += tokens
        found.append([oracle.to_numpy(a) for a in store.extend(0, *some, return_lse=True, **options)])
    return store, tuple(np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))


def random_chunks(rng, tokens):
    found = []
    while sum(found) < tokens:
        found.append(min(int(rng.integers(1, 90)), tokens - sum(found)))
    return found


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"dtype": "float16"}, id="float16"),
        pytest.param(
            {"dtype": "float16", "window": 40, "sinks": 3},
            id="ring",
            marks=[pytest.mark.thorough, pytest.mark.full("vulkan")],
        ),
        pytest.param(
            {"dtype": "float16", "window": 40, "sinks": 3, "rows": np.float16},
            id="half-ring",
            marks=[pytest.mark.thorough, pytest.mark.full("vulkan")],
        ),
        pytest.param(
            {"dtype": "q8_0", "v_dtype": "q4_0"}, id="codes", marks=[pytest.mark.thorough, pytest.mark.full("vulkan")]
        ),
        pytest.param(
            {"dtype": tikv.Quant(4, 32, axis="tokens", residual=32)},
            id="tokens",
            marks=[pytest.mark.thorough, pytest.mark.full("vulkan")],
        ),
        pytest.param(
            {"dtype": tikv.Quant(4, 32, sinks=3, recent=20)},
            id="recent",
            marks=[pytest.mark.thorough, pytest.mark.full("vulkan")],
        ),
    ],
)
def test_chunks_of_a_prompt(arch, rng, config):
    """Rows of q in float16 over such a store are attended to by CUDA's tensor cores, unless there are sink logits."""
    config = dict(config)
    rows = rows_of(rng, 2, dtype=(dtype := config.pop("rows", np.float32)))
    options = {"sink_logits": oracle.place(SINKS, arch)} if "window" in config and dtype is np.float32 else {}
    with invariant(KEYS):
        _, want = extended(arch, rows, config, [1] * TOKENS, **options)
        for _ in range(3):
            store, got = extended(arch, rows, config, random_chunks(rng, TOKENS), **options)
            same(got, want)
            last = oracle.place(np.ascontiguousarray(rows[0][:, -1]), arch)
            same(store.attend(0, last, return_lse=True, **options), (want[0][:, -1], want[1][:, -1]))
        alone = [a[1:] for a in rows]
        _, got = extended(arch, alone, config, [TOKENS], **options)
        same(got, tuple(a[1:] for a in want))


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float16, marks=pytest.mark.thorough)])
def test_pools_and_layers(arch, rng, dtype):
    """Sequences of different lengths in one call, forks, and a layer of the same tokens."""
    rows = rows_of(rng, dtype=dtype)
    with invariant(KEYS):
        _, want = extended(arch, rows, {"dtype": "float16"}, [TOKENS])
        pool = tikv.PagedKVCacheStore(
            num_layers=1, num_kv_heads=2, head_dim=WIDTH, num_blocks=80, block_size=8, dtype="float16"
        )
        a, b = pool.add(), pool.add()
        q, k, v = (x[0] for x in rows)
        place = lambda *parts: oracle.place(np.concatenate(parts), arch)  # noqa: E731
        first = pool.extend(0, *(place(x[:90], x[:31]) for x in (q, k, v)), [a, b], [0, 90, 121], return_lse=True)
        c = pool.fork(b)
        then = pool.extend(0, *(place(x[31:33], x[31:100]) for x in (q, k, v)), [c, b], [0, 2, 71], return_lse=True)
        for got, of in ((first, [(0, 90), (0, 31)]), (then, [(31, 33), (31, 100)])):
            expected = tuple(np.concatenate([x[0, i:j] for i, j in of]) for x in want)
            same(got, expected)


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float16, marks=pytest.mark.thorough)])
def test_per_head_pages_after_a_compaction(arch, rng, dtype):
    """What a head keeps has the bits of the same tokens in a sequence of one head each."""
    _, k, v = rows_of(rng, tokens=60)
    q = rng.standard_normal((1, 4, WIDTH)).astype(dtype)
    keep = np.zeros((2, 60), bool)
    keep[0, rng.permutation(60)[:50]], keep[1, rng.permutation(60)[:17]] = True, True
    place = lambda a: oracle.place(np.ascontiguousarray(a), arch)  # noqa: E731
    with invariant(KEYS):
        pool = tikv.PagedKVCacheStore(
            num_layers=1, num_kv_heads=2, head_dim=WIDTH, num_blocks=80, block_size=8, dtype="float16", per_head=True
        )
        seq = pool.add()
        pool.append(0, place(k[0]), place(v[0]), [seq], [0, 60])
        pool.compact(0, seq, keep)
        got = oracle.to_numpy(pool.attend(0, place(q), [seq]))
        for h in range(2):
            rows = [np.moveaxis(a[:1, keep[h], h : h + 1], 1, 2).astype(np.float16) for a in (k, v)]
            alone = tikv.decode_attention(place(q[:, 2 * h : 2 * h + 2]), *map(place, rows), int(keep[h].sum()))
            same(got[:, 2 * h : 2 * h + 2], alone)


@pytest.mark.archs("cpu")
def test_tiles_are_refused(arch):
    refused = r"kvarn_k4v2 under tikv.init\(invariant=True\) is not supported"
    with invariant(KEYS), pytest.raises(tikv.OptionError, match=refused):
        store_of(1, 8, {"dtype": "kvarn_k4v2"})
