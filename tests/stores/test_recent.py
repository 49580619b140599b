"""Formats of groups whose first and newest tokens stay as they came: ``tikv.Quant(sinks=, recent=)``."""

import numpy as np
import oracle
import pytest

import tikv

pytestmark = pytest.mark.thorough

BATCH, HEADS, QUERIES, WIDTH = 2, 2, 4, 64


def rows_of(rng, arch, count, heads=HEADS):
    return oracle.place(rng.standard_normal((BATCH, count, heads, WIDTH)).astype(np.float16), arch)


def attention(q, k, v):
    """Attention of the newest token's query in float64."""
    k, v = (np.repeat(oracle.to_numpy(a).astype(np.float64), QUERIES // HEADS, axis=1) for a in (k, v))
    scores = oracle.to_numpy(q).astype(np.float64).swapaxes(1, 2) @ k.swapaxes(-1, -2) / np.sqrt(WIDTH)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ v).swapaxes(1, 2)


@pytest.mark.parametrize(
    ("quant", "options"),
    [
        (tikv.Quant(4, 64, sinks=4, recent=64), {}),
        (tikv.Quant(2, 32, sinks=3), {}),
        (tikv.Quant(4, 32, recent=33, rotate="hadamard"), {}),
        (tikv.Quant(4, 32, sinks=2, recent=16), {"v_dtype": "float16"}),
        (tikv.Quant(4, 32, recent=40), {"window": 100, "sinks": 4}),
        (tikv.Quant(3, 32, "tokens", 32, sinks=5), {}),
    ],
    ids=str,
)
def test_older_tokens_have_the_bits_of_the_plain_format(arch, rng, tmp_path, quant, options):
    """First and newest tokens have the bits that were given, all others those of a store without sinks and recent."""
    if arch == "vulkan" and not (quant.sinks and quant.recent):
        pytest.skip("other kernels than the first case's are compiled for the formats without sinks and recent tokens")
    form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, "capacity": 500, "batch_size": BATCH, **options}
    store = tikv.KVCacheStore(**form, dtype=quant)
    plain = tikv.KVCacheStore(**form, dtype=tikv.Quant(quant.bits, quant.group, rotate=quant.rotate))
    exact = tikv.KVCacheStore(**form, dtype="float16") if not options.get("v_dtype") else None
    sinks = quant.sinks or options.get("sinks", 0)
    for count in (2, 70, 1, 60, 1, 130):
        k, v = rows_of(rng, arch, count), rows_of(rng, arch, count)
        for each in (store, plain, exact):
            if each is not None:
                each.append(0, k, v)
        new = store.length - sinks - store.quantised(0)
        assert store.length <= sinks + new or quant.newest <= new <= quant.newest + quant.group
        q = rows_of(rng, arch, 1, QUERIES)
        held = store.tokens(0)
        expected = attention(q, *held)
        assert abs(oracle.to_numpy(store.attend(0, q)) - expected).max() <= 2.0**-9 * abs(expected).max()
        if exact is not None and quant.axis == "head_dim":
            for a, codes, numbers in zip(held, plain.tokens(0), exact.tokens(0), strict=True):
                both = oracle.to_numpy(codes).copy()
                for of_rows in (slice(0, sinks), slice(both.shape[2] - new, None)):
                    both[:, :, of_rows] = oracle.to_numpy(numbers)[:, :, of_rows]
                oracle.assert_same_bits(a, both)
    store.trim(max(1, quant.newest))
    path = tmp_path / "recent.safetensors"
    store.save(path)
    again, q = tikv.KVCacheStore.load(path), rows_of(rng, arch, 1, QUERIES)
    assert repr(again) == repr(store)
    oracle.assert_same_bits(again.attend(0, q), oracle.to_numpy(store.attend(0, q)))
    k, v = rows_of(rng, arch, 40), rows_of(rng, arch, 40)
    q = rows_of(rng, arch, 40, QUERIES)
    out = oracle.to_numpy(store.extend(0, q, k, v))[:, -1:]
    expected = attention(oracle.place(np.ascontiguousarray(oracle.to_numpy(q)[:, -1:]), arch), *store.tokens(0))
    assert abs(out - expected).max() <= 2.0**-9 * abs(expected).max()


FORM = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 64, "capacity": 100}


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: tikv.Quant(4, sinks=-1), "sinks=-1 is not supported"),
        (lambda: tikv.Quant(4, recent=True), "recent=True is not supported"),
        (lambda: tikv.Quant(4, 32, "tokens", 32, recent=3), "recent=3 with axis='tokens' is not supported"),
        (
            lambda: tikv.KVCacheStore(**FORM, dtype=tikv.Quant(4, sinks=2), window=50),
            "with sinks=0 or a window is not supported",
        ),
        (lambda: tikv.KVCacheStore(**FORM, dtype="float16", v_dtype=tikv.Quant(4, sinks=2)), "sinks and recent"),
        (lambda: tikv.quantize(np.ones((1, 64), np.float32), tikv.Quant(4, recent=2)), "sinks and recent tokens are"),
    ],
)
@pytest.mark.archs("cpu")
def test_refused(arch, call, match):
    with pytest.raises(tikv.OptionError, match=match):
        call()
