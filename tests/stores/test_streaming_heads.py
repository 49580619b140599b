"""Heads that keep all tokens beside heads with sinks and a window: each as in a store of its own, in float64."""

import copy

import numpy as np
import oracle
import pytest

import tikv

HEADS, GROUP, WIDTH, WINDOW, SINKS = 4, 2, 16, 9, 2
FORM = {"num_layers": 2, "num_kv_heads": HEADS, "head_dim": WIDTH, "capacity": 48, "window": WINDOW, "sinks": SINKS}
WHOLE = np.array([[True, False, False, True], [False, False, False, False]])


def made(**options):
    return tikv.StreamingHeadsStore(**{**FORM, "whole": WHOLE, "dtype": "float32", **options})


def attention(q, keys, values, whole):
    """(T, Hq, D) of the newest queries, in float64."""
    n, first = len(keys), len(keys) - len(q)
    at, key = first + np.arange(len(q))[:, None], np.arange(n)
    out = np.zeros(q.shape)
    for h in range(q.shape[1]):
        seen = key <= at
        if not whole[h // GROUP]:
            seen &= (key < SINKS) | (key > at - (WINDOW - SINKS))
        scores = q[:, h].astype(np.float64) @ keys[:, h // GROUP].astype(np.float64).T / np.sqrt(WIDTH)
        w = np.where(seen, np.exp(scores), 0)
        out[:, h] = w / w.sum(axis=1, keepdims=True) @ values[:, h // GROUP].astype(np.float64)
    return out


@pytest.mark.parametrize("layout", ["token_major", "head_major"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_each_head_sees_its_own_tokens(arch, rng, library, layout):
    torch = pytest.importorskip("torch") if library == "torch" else None
    if torch is not None and arch == "vulkan":
        pytest.skip("torch has no Vulkan tensors")

    def place(a):
        a = np.ascontiguousarray(a.swapaxes(0, 1)) if layout == "head_major" else a
        return a if torch is None else torch.from_numpy(a).to("cuda" if arch == "cuda" else "cpu")

    store, held = made(), [np.zeros((2, 0, HEADS, WIDTH), np.float32)] * 2
    for tokens in (12, 1, 1, 5, 1):
        for layer in range(2):
            q = rng.standard_normal((tokens, HEADS * GROUP, WIDTH)).astype(np.float32)
            rows = rng.standard_normal((2, tokens, HEADS, WIDTH)).astype(np.float32)
            out = store.extend(layer, place(q), *map(place, rows), layout=layout)
            held[layer] = np.concatenate([held[layer], rows], axis=1)
            want = attention(q, *held[layer], WHOLE[layer])
            again = store.attend(layer, place(q[-1:]), layout=layout)
            for got, expected in ((out, want), (again, want[-1:])):
                got = oracle.to_numpy(got)
                got = got.swapaxes(0, 1) if layout == "head_major" else got
                np.testing.assert_allclose(got, expected, atol=1e-5)
    assert store.length == 20
    assert store.held(0).tolist() == [[20, WINDOW, WINDOW, 20]]
    ring = [0, 1, *range(13, 20)]
    assert store.positions(0)[0, 1].tolist() == ring + [-1] * 11
    assert store.positions(1)[0].tolist() == [ring] * HEADS


def test_memory_is_that_of_what_heads_keep(arch):
    row = 2 * WIDTH * 4
    assert made().nbytes == (2 * 48 + 6 * WINDOW) * row
    assert made(whole=np.ones(HEADS, bool)).nbytes == 2 * HEADS * 48 * row
    assert repr(made()).startswith(
        "StreamingHeadsStore(2 layers, 6 of 8 heads with a window of 9 and 2 sinks, 0 tokens"
    )


def test_what_fails_leaves_all_heads_as_they_were(arch, rng):
    store = made()
    rows = rng.standard_normal((2, 40, HEADS, WIDTH)).astype(np.float32)
    q = rng.standard_normal((40, HEADS * GROUP, WIDTH)).astype(np.float32)
    for layer in range(2):
        store.append(layer, *rows)
    before, twin = store.positions(0), copy.deepcopy(store)
    with pytest.raises(tikv.CapacityError):
        store.extend(0, q, *rows)
    with pytest.raises(tikv.ShapeError, match="a multiple of the 4 KV heads"):
        store.attend(0, q[:, :6])
    with pytest.raises(tikv.ShapeError, match="there are 4 KV heads"):
        store.append(0, q, q)
    with pytest.raises(tikv.ShapeError):
        store.append(0, rows[0], rows[1, :, :, :8])
    np.testing.assert_array_equal(store.positions(0), before)
    np.testing.assert_array_equal(store.attend(0, q[:1]), twin.attend(0, q[:1]))
    mark = store.snapshot()
    store.append(0, *rows[:, :3])
    store.append(1, *rows[:, :3])
    store.restore(mark)
    np.testing.assert_array_equal(store.positions(0), before)
    with pytest.raises(tikv.OptionError, match="not what snapshot"):
        store.restore(mark[:1])
    with pytest.raises(tikv.PositionError):
        store.trim(41)
    assert store.length == 40
    store.reset()
    assert store.length == 0


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"whole": np.ones(3, bool)}, tikv.ShapeError, r"whole is bool \(3,\); it must be bool \(2, 4\)"),
        ({"whole": np.ones(4)}, tikv.ShapeError, "whole is float64"),
        ({"dtype": "float8_e4m3fn", "k_scale": [1.0, 2.0, 1.0, 1.0]}, tikv.OptionError, "k_scale has several numbers"),
        ({"sinks": 9}, tikv.TikvError, "sinks"),
        ({"window": None}, tikv.TikvError, "window"),
    ],
)
def test_refused(arch, options, error, says):
    with pytest.raises(error, match=says):
        made(**options)
