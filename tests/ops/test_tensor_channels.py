"""Attention by CUDA's tensor cores over keys by channel, against float64 over the numbers that the codes stand for.

Numbers of V and their weights are rounded to halves, or to bfloat16 over V in bfloat16.
"""

import types

import ml_dtypes
import numpy as np
import oracle
import pytest
from inside import codes_of
from ops.test_tensor_cores import CUDA, TOLERANCE

import tikv
from tikv import arrays, dtypes
from tikv.ops.attention import by_channel
from tikv.ops.attention.by_channel import ChannelKeys, ScoredValues, channel_plan
from tikv.ops.attention.request import AttentionScale
from tikv.runtime.cache import BoundedCache
from tikv.stores.layers import coded_arrays

GROUP = 64
FORMS = {
    "4 bits": {},
    "4 bits, V float16": {"v_dtype": "float16"},
    "8 bits": {"bits": 8},
    "4 bits, V bfloat16": {"v_dtype": "bfloat16"},
    "4 bits, V int8": {"v_dtype": "int8"},
    "8 bits, V q4_0, heads of 64": {"bits": 8, "v_dtype": "q4_0", "width": 64},
    "4 bits, V q8_0, heads of 96": {"v_dtype": "q8_0", "width": 96},
}
COMBINED = {
    "8 bits, V float16, heads of 96": {"bits": 8, "v_dtype": "float16", "width": 96},
    "8 bits, V bfloat16, heads of 64": {"bits": 8, "v_dtype": "bfloat16", "width": 64},
    "4 bits, V 4 bits in groups of 32, heads of 64": {"v_dtype": tikv.Quant(4, 32), "width": 64},
    "8 bits, V 8 bits in groups of 128": {"bits": 8, "v_dtype": tikv.Quant(8, 128)},
}


class Channels:
    """A store whose keys have a few channels of large numbers, as models' keys do."""

    def __init__(self, rng, arch, tokens, *, bits=4, v_dtype=None, width=128, batch=2, heads=2, scale=1):
        self.rng, self.arch, self.heads, self.batch, self.width = rng, arch, heads, batch, width
        self.store = tikv.KVCacheStore(
            num_layers=1, num_kv_heads=heads, head_dim=width, batch_size=batch, capacity=tokens,
            dtype=tikv.Quant(bits, GROUP, "tokens", GROUP), v_dtype=v_dtype,
        )  # fmt: skip
        k, v = rng.standard_normal((2, batch, tokens, heads, width))
        k[..., :: width // 4] *= 20
        given = np.float32 if v_dtype == "bfloat16" else np.float16
        self.store.append(0, *(oracle.place(a.astype(given), arch) for a in (k * scale, v)))

    @property
    def codes(self):
        return codes_of(self.store)[0]

    def queries(self, group, tokens, dtype="float16"):
        q = self.rng.standard_normal((self.batch, self.heads * group, tokens, self.width)).astype(np.float32)
        return q.astype(np.float16 if dtype == "float16" else ml_dtypes.bfloat16)

    def over_codes(self, q, oldest=0):
        """Attention over the codes alone, from a token on."""
        found = self.codes.attend("attend", arrays.view(oracle.place(q, self.arch), "q", "attend"),
                                  AttentionScale(None, None), oldest)  # fmt: skip
        return [arrays.read_host(a, self.store.runtime) for a in found]

    def expected(self, q, first=0, end=None, queries=0):
        """Results and log-sum-exps over tokens `first` to `end`; each of several `queries` sees those up to its own."""
        k, v = (np.asarray(oracle.to_numpy(a), np.float64)[:, :, first:end] for a in self.store.tokens(0))
        group, n = q.shape[1] // self.heads, k.shape[2]
        k, v = (np.repeat(a, group, axis=1) for a in (k, v))
        scores = np.asarray(q, np.float64) @ k.swapaxes(2, 3) * self.width**-0.5
        if queries:
            scores[..., np.arange(n) > np.arange(n - queries, n)[:, None]] = -np.inf
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        return weights / total @ v, (np.log(total) + top)[..., 0]


def check(got, want, dtype="float16"):
    for a, b, most in zip(got, want, (TOLERANCE[dtype], 2e-5), strict=False):
        error = np.abs(np.asarray(a, np.float64) - b).max() / max(1, np.abs(b).max())
        assert error <= most, f"{error:.2e}"


@pytest.fixture
def in_place(monkeypatch):
    """Fail where scores are computed first."""
    monkeypatch.setattr(coded_arrays, "channel_scores", None)


@pytest.mark.archs("cuda")
@pytest.mark.parametrize(
    "form", [pytest.param(form, id=name, marks=pytest.mark.full if name in COMBINED else ())
             for name, form in (FORMS | COMBINED).items()]
)  # fmt: skip
def test_formats(arch, rng, in_place, form):
    query = "bfloat16" if form.get("v_dtype") == "bfloat16" else "float16"
    made = Channels(rng, arch, 9 * GROUP + 30, **form)
    assert made.codes.tokens == 8 * GROUP
    for queries in (1,) if form else (1, 3):
        q = made.queries(4, queries, query)
        check(made.over_codes(q), made.expected(q, end=made.codes.tokens), query)
        got = made.store.attend(0, oracle.place(q, arch), layout="head_major")
        check([oracle.to_numpy(got)], made.expected(q, queries=queries), query)


@pytest.mark.archs("cuda")
def test_parts_of_long_texts(arch, rng, in_place):
    """Several blocks share the keys of a head, and of more query heads than a block has rows."""
    made = Channels(rng, arch, 66 * GROUP, batch=1, heads=1)
    q = made.queries(12, 1)
    check(made.over_codes(q), made.expected(q, end=made.codes.tokens))
    q = made.queries(4, 1, "bfloat16")
    check(made.over_codes(q), made.expected(q, end=made.codes.tokens), "bfloat16")


@pytest.mark.archs("cuda")
@pytest.mark.parametrize("v_dtype", [None, "float16"])
@pytest.mark.parametrize("oldest", [40, 64, 470, 511])
def test_tokens_from_one_within_a_group(arch, rng, in_place, oldest, v_dtype):
    """Tokens before the oldest one have no weight, even if V is infinite there."""
    made = Channels(rng, arch, 9 * GROUP + 30, v_dtype=v_dtype)
    values = made.codes.arrays[-1]  # or their scales
    host = arrays.read_host(values, made.store.runtime)
    host[:, :, :oldest:3] = np.inf
    arrays.write_host(host, values)
    q = made.queries(4, 1)
    check(made.over_codes(q, oldest), made.expected(q, oldest, made.codes.tokens))


@pytest.mark.archs("cuda")
@pytest.mark.parametrize("scale", [1e-4, 1e-2, 50])
def test_small_and_large_keys(arch, rng, in_place, scale):
    """Scales of codes far from 1 leave no bits out."""
    made = Channels(rng, arch, 5 * GROUP, scale=scale)
    q = made.queries(4, 1)
    check(made.over_codes(q), made.expected(q, end=made.codes.tokens))


@pytest.mark.archs("cuda")
def test_what_is_not_served_takes_scores(arch, rng):
    """A soft cap and float32 queries."""
    made = Channels(rng, arch, 5 * GROUP)
    q = made.queries(4, 1)
    got = made.store.attend(0, oracle.place(q.astype(np.float32), arch), layout="head_major")
    check([oracle.to_numpy(got)], made.expected(q))
    got = made.store.attend(0, oracle.place(q, arch), layout="head_major", softcap=1e4)
    check([oracle.to_numpy(got)], made.expected(q))


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("change", "serves"),
    [
        ({}, True),
        ({"query": dtypes.bfloat16}, True),
        ({"query": dtypes.float32}, False),
        ({"scale_dtype": "float32"}, False),
        ({"v_dtype": "float16"}, True),
        ({"v_dtype": "bfloat16", "head_dim": 64}, True),
        ({"v_dtype": "int8"}, True),
        ({"v_dtype": "q8_0", "head_dim": 96}, True),
        ({"v_dtype": "q4_0"}, True),
        ({"v_dtype": "q4_0", "head_dim": 96}, False),  # 12 codes of a row for each lane
        ({"v_dtype": "float32"}, False),
        ({"v_dtype": "float8_e5m2"}, False),
        ({"v_dtype": "mxfp8"}, False),
        ({"v_dtype": tikv.Quant(4, 32)}, True),
        ({"v_dtype": tikv.Quant(3, 64)}, False),
        ({"dtype": tikv.Quant(8, 64, "tokens", 64), "v_dtype": tikv.Quant(8, 64)}, True),
        ({"dtype": tikv.Quant(8, 64, "tokens", 64)}, True),
        ({"dtype": tikv.Quant(3, 64, "tokens", 64)}, False),
        ({"dtype": tikv.Quant(4, 32, "tokens", 64)}, False),
        ({"head_dim": 64}, True),
        ({"head_dim": 256}, False),
        ({"head_dim_v": 64}, False),
        ({"window": 256}, False),
        ({"softcap": 30.0}, False),
    ],
)
def test_what_is_served(arch, ampere, monkeypatch, change, serves):
    form = {"dtype": tikv.Quant(4, 64, "tokens", 64), "v_dtype": tikv.Quant(4, 64), "head_dim": 128} | change
    query, softcap = form.pop("query", dtypes.float16), form.pop("softcap", None)
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, batch_size=1, capacity=512, **form)
    found = codes_of(store)[0]
    coded = found._coded
    q = arrays.new_array((1, 8, 1, form["head_dim"]), query, store.runtime)
    given = {"q": q, "k": coded.k, "v": coded.v, "k_scale": coded.k_numbers}
    if coded.v_numbers is not None:
        given["v_scale"] = coded.v_numbers
    keys = ChannelKeys(coded.k, coded.k_numbers, coded.form.keys)
    values = ScoredValues(coded.values(), coded.form.values.width, found.room, found.room if found.rings else 0)
    monkeypatch.setattr(by_channel, "AttentionPlan", lambda *given: "planned")
    live = types.SimpleNamespace(**vars(CUDA), plans=BoundedCache())
    plan = channel_plan(live, "attend", given, keys, values, AttentionScale(None, softcap))
    assert (plan is not None) == serves
