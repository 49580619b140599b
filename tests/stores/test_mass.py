"""The attention mass of what stores hold, against the weights of plain softmaxes over explicit positions."""

import itertools

import numpy as np
import oracle
import pytest

import tikv
from tikv import reference

pytestmark = pytest.mark.thorough

GROUP, WIDTH, HEADS = 2, 16, 2


class Queries:
    """The newest tokens' queries (batch, Hq, T, D), and the mass that they give the tokens of a store."""

    def __init__(self, rng, batch, tokens):
        self.q = rng.standard_normal((batch, HEADS * GROUP, tokens, WIDTH)).astype(np.float32)

    def mass(self, keys, held, length, last=None, *, window=None, sinks=0, ring=None, oldest=0):
        """(batch, heads, held), of `keys` (batch, heads, length, D) by position."""
        batch, _, tokens, _ = self.q.shape
        found = np.zeros((batch, HEADS, length))
        for b, h, t in itertools.product(range(batch), range(HEADS * GROUP), range(tokens)):
            if last is not None and t < tokens - last:
                continue
            at = reference.visible_positions(
                length, t, tokens, window=window, sinks=sinks, held=ring, first_valid=oldest
            )  # fmt: skip
            each, _ = reference.attention(
                self.q[b, h, t], keys[b, h // GROUP, at], np.eye(len(at)), scale=WIDTH**-0.5
            )  # fmt: skip
            found[b, h // GROUP, at] += each
        return found[:, :, held]


def rows(rng, batch, tokens):
    """(k, v) head-major, of values that int8 and float16 keep nearly as they are."""
    return rng.integers(-8, 9, (2, batch, HEADS, tokens, WIDTH)).astype(np.float32) / 8


def close(mass, want):
    assert oracle.to_numpy(mass).dtype == np.float32
    np.testing.assert_allclose(oracle.to_numpy(mass), want, atol=2e-5)


def test_mass_of_a_linear_layer(arch, rng):
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, capacity=40, batch_size=2)
    k, v = rows(rng, 2, 6)
    place = lambda a: oracle.place(np.ascontiguousarray(a), arch)  # noqa: E731
    first, second = Queries(rng, 2, 5), Queries(rng, 2, 1)
    out, mass = store.extend(
        0, place(first.q), place(k[:, :, :5]), place(v[:, :, :5]), layout="head_major", return_mass=True, mass_queries=2
    )
    assert out.shape == first.q.shape
    close(mass, first.mass(k, range(5), 5, 2))
    found = store.attend(0, place(first.q.swapaxes(1, 2)), return_lse=True, return_mass=True)
    assert [a.shape for a in found][1:] == [(2, 5, HEADS * GROUP), (2, HEADS, 5)]
    close(found[2], first.mass(k, range(5), 5))
    store.append(0, place(k[:, :, 5:]), place(v[:, :, 5:]), layout="head_major")
    close(store.attend(0, place(second.q[:, :, 0]), return_mass=True)[1], second.mass(k, range(6), 6))
    options = {"layout": "head_major", "return_mass": True, "mass_queries": 64}
    close(store.attend(0, place(second.q), **options)[1], second.mass(k, range(6), 6))
    nothing = [place(a[:, :, :0]) for a in (first.q, k, v)]
    assert (oracle.to_numpy(store.extend(0, *nothing, layout="head_major", return_mass=True)[1]) == 0).all()


def test_mass_of_a_ring_is_in_the_order_of_its_tokens(arch, rng):
    """The sinks, then the oldest that is left; also after a trim, which leaves fewer than the window."""
    window, sinks = 8, 2
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, capacity=window, window=window,
                              sinks=sinks, dtype="int8")  # fmt: skip
    k, v = rows(rng, 1, 12)
    place = lambda a: oracle.place(np.ascontiguousarray(a), arch)  # noqa: E731
    stored = tikv.quantize(place(k[0]))
    real = oracle.to_numpy(tikv.dequantize(*stored))[None].astype(np.float64)
    first, second = Queries(rng, 1, 11), Queries(rng, 1, 1)
    mass = store.extend(0, *(place(a) for a in (first.q, k[:, :, :11], v[:, :, :11])), layout="head_major",
                        return_mass=True, mass_queries=3)[1]  # fmt: skip
    seen = {"window": window, "sinks": sinks}
    close(mass, first.mass(real[:, :, :11], [0, 1, *range(5, 11)], 11, 3, **seen))
    mass = store.extend(0, *(place(a) for a in (second.q, k[:, :, 11:], v[:, :, 11:])), layout="head_major",
                        return_mass=True)[1]  # fmt: skip
    close(mass, second.mass(real, [0, 1, *range(6, 12)], 12, **seen))
    store.trim(2)
    mass = store.attend(0, place(second.q[:, :, 0]), return_mass=True)[1]
    close(mass, second.mass(real[:, :, :10], [0, 1, *range(6, 10)], 10, oldest=6, **seen))


@pytest.mark.full("vulkan")  # its parts run there, each by itself
def test_mass_of_sequences_of_a_pool(arch, rng):
    """By position, the shorter sequences' zeros behind theirs; prompts of different lengths in one call."""
    pool = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, num_blocks=16, block_size=4)
    place = lambda a: oracle.place(np.ascontiguousarray(a), arch)  # noqa: E731
    seqs, counts = [pool.add(), pool.add(), pool.add()], (7, 3, 3)
    (k, v), asked = rows(rng, 3, 8), [Queries(rng, 1, n) for n in counts]
    token_major = lambda a: place(np.concatenate([b[0].swapaxes(0, 1) for b in a]))  # noqa: E731
    _, lse, mass = pool.extend(
        0, token_major([a.q for a in asked]), *(token_major([a[b : b + 1, :, :n] for b, n in enumerate(counts)])
        for a in (k, v)), seqs, cu_seqlens=[0, 7, 10, 13], window=5, return_lse=True, return_mass=True, mass_queries=3,
    )  # fmt: skip
    assert (lse.shape, mass.shape) == ((13, HEADS * GROUP), (3, HEADS, 7))
    mass = oracle.to_numpy(mass)
    for b, n in enumerate(counts):
        close(mass[b : b + 1, :, :n], asked[b].mass(k[b : b + 1, :, :n], range(n), n, 3, window=5))
        assert (mass[b, :, n:] == 0).all()
    one = [Queries(rng, 1, 1) for _ in counts]
    mass = pool.attend(0, place(np.concatenate([a.q[:, :, 0] for a in one])), seqs, return_mass=True)[1]
    assert mass.shape == (3, HEADS, 7)
    mass = oracle.to_numpy(mass)
    for b, n in enumerate(counts):
        close(mass[b : b + 1, :, :n], one[b].mass(k[b : b + 1, :, :n], range(n), n))


@pytest.mark.parametrize("kind", ["ContiguousKVLayer", "PagedKVLayer"])
def test_mass_of_a_layer(arch, rng, kind):
    sizes = (40, HEADS, WIDTH) if kind == "ContiguousKVLayer" else (10, 4, HEADS, WIDTH)
    layer = getattr(tikv, kind)(*sizes)
    place = lambda a: oracle.place(np.ascontiguousarray(a), arch)  # noqa: E731
    (k, v), first, second = rows(rng, 1, 5), Queries(rng, 1, 5), Queries(rng, 1, 3)
    if kind == "PagedKVLayer":
        layer.paged_block_indices = [3, 1]
    mass = layer.extend(*(place(a[0]) for a in (first.q, k, v)), layout="head_major", return_mass=True,
                        mass_queries=2)[1]  # fmt: skip
    close(oracle.to_numpy(mass)[None], first.mass(k, range(5), 5, 2))
    attend = layer.contig_decode_attention if kind == "ContiguousKVLayer" else layer.paged_decode_attention
    out, mass = attend(place(second.q[0]), q_layout="head_major", return_mass=True)
    assert out.shape == second.q.shape[1:]
    close(oracle.to_numpy(mass)[None], second.mass(k, range(5), 5))


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"mass_queries": 3}, tikv.OptionError, "needs return_mass"),
        ({"return_mass": True, "mass_queries": 0}, tikv.PositionError, "mass_queries=0"),
        ({"return_mass": True, "mass_queries": 1.5}, tikv.DTypeError, "not an integer"),
        ({"return_mass": True, "seq_lens": np.array([3], np.int32)}, tikv.OptionError, "seq_lens"),
    ],
)
def test_mass_that_cannot_be_had_is_refused(options, error, says, arch):
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=4, capacity=4, dtype="float32")
    store.append(0, *np.ones((2, 3, 1, 4), np.float32))
    out = np.full((1, 2, 4), 7, np.float32)
    with pytest.raises(error, match=says) as caught:
        store.attend(0, np.ones((1, 2, 4), np.float32), out=out, **options)
    assert str(caught.value).startswith("KVCacheStore.attend: ")
    assert (out == 7).all()
