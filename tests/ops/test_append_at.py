"""Appends at positions that the launch reads, in every format: the bits of a store's own appends."""

import numpy as np
import oracle
import pytest

import tikv
from tikv.arrays import CacheArray, runtime_of, to_device
from tikv.ops.append_at import append_at
from tikv.stores.layers.growing import GrowingLayer

pytestmark = pytest.mark.thorough

FORMATS = [
    {"dtype": "float32"},
    {"dtype": "int8"},
    {"dtype": "float16", "v_dtype": "int8"},
    {"dtype": "float8_e4m3fn", "k_scale": [0.5, 2.0], "v_scale": 2.0},
    {"dtype": tikv.Quant(bits=4, group=32)},
]


def layer(stored, slots):
    return GrowingLayer(num_kv_heads=2, head_dim=32, capacity=slots, batch_size=2, **stored)


def append(to, rows, at, **options):
    positions = np.full(2, at, np.int64)
    append_at(
        "append_at", rows, (to.keys, to.values), to.scales, tikv_array(positions), formats=to.rows.formats, **options
    )


def tikv_array(a):
    live = runtime_of()
    return CacheArray(to_device(a, live), live)


@pytest.mark.parametrize("stored", [pytest.param(f, marks=[pytest.mark.full] * (i > 1)) for i, f in enumerate(FORMATS)])
def test_one_token_after_another(arch, rng, stored):
    """Those behind the last slot are skipped."""
    k, v = (oracle.numbers(rng, (2, 2, 5, 32), np.float32) for _ in "kv")
    got, want = layer(stored, 4), layer(stored, 4)
    want.append(k[:, :, :4], v[:, :, :4])
    for t in range(5):
        append(got, (np.ascontiguousarray(k[:, :, t : t + 1]), np.ascontiguousarray(v[:, :, t : t + 1])), t)
    got.recount(length=4, origin=0)
    for a, b in zip(got.decoded(0), want.decoded(0), strict=True):
        oracle.assert_same_bits(oracle.to_numpy(a), oracle.to_numpy(b))


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_ring_behind_sinks(arch, rng, tokens):
    """Position p goes to slot 2 + (p - 2) % 4."""
    k, v = (oracle.numbers(rng, (2, 2, 12, 32), np.float32) for _ in "kv")
    got = layer({"dtype": "float32"}, 6)
    for t in range(0, 12, tokens):
        rows = (np.ascontiguousarray(a[:, :, t : t + tokens]) for a in (k, v))
        append(got, tuple(rows), t, ring=4, sinks=2)
    order = [0, 1, 10, 11, 8, 9]
    oracle.assert_same_bits(oracle.to_numpy(got.keys), k[:, :, order])
    oracle.assert_same_bits(oracle.to_numpy(got.values), v[:, :, order])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"rows": (2, 2, 1, 31)}, tikv.ShapeError),
        ({"rows": (2, 3, 1, 32)}, tikv.ShapeError),
        ({"positions": 3}, tikv.ShapeError),
        ({"ring": 7}, tikv.CapacityError),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(arch, change, error):
    to = layer({"dtype": "float32"}, 6)
    rows = np.ones(change.get("rows", (2, 2, 1, 32)), np.float32)
    positions = tikv_array(np.zeros(change.get("positions", 2), np.int64))
    with pytest.raises(error, match="append_at"):
        append_at("append_at", (rows, rows), (to.keys, to.values), to.scales, positions, ring=change.get("ring", 0))
