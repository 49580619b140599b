"""KVarN: the reference against the definition in float64."""

import numpy as np
import pytest

from tikv import reference

OF = ("keys", "values")


def uneven(rng, lead, tokens, width, dtype=np.float32):
    """Tokens and channels of very different magnitudes, as in models."""
    by_token, by_channel = (np.exp(rng.standard_normal(shape)) for shape in ((tokens, 1), width))
    return (rng.standard_normal((*lead, tokens, width)) * by_token * by_channel).astype(dtype)


def by_definition(tile, bits, of):
    """(codes as rows, the tile that they stand for) of a tile G x D in float64, as KVarN states it, with logarithms."""
    matrix = np.ones((1, 1))
    while len(matrix) < tile.shape[1]:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix /= np.sqrt(len(matrix))
    x = tile.astype(np.float64) @ matrix
    t, c = np.zeros((len(x), 1)), np.zeros((1, x.shape[1]))

    def spread(axis):
        return (x / np.exp(t) / np.exp(c)).std(axis, ddof=1, keepdims=True)

    def imbalance():
        return sum(a.max() / max(a.min(), 1e-8) for a in (spread(1), spread(0)))

    iterates = [(imbalance(), t, c)]
    for _ in range(16):
        t = np.clip(t + np.log(np.clip(spread(1), 1e-3, 1e3)), -0.3, 10)
        c = np.clip(c + np.log(np.clip(spread(0), 1e-3, 1e3)), -0.3, 10)
        iterates.append((imbalance(), t, c))
    _, t, c = min(reversed(iterates), key=lambda iterate: iterate[0])
    balanced, axis, last = x / np.exp(t) / np.exp(c), 0 if of == "keys" else 1, 2**bits - 1
    low, high = balanced.min(axis, keepdims=True), balanced.max(axis, keepdims=True)
    scale = np.maximum((high - low) / last, 1e-10)
    codes = np.clip(np.round((balanced - low) / scale), 0, last)
    stands_for = (codes * scale + low) * np.exp(t) * np.exp(c) @ matrix.T
    return codes.T if of == "keys" else codes, stands_for


def codes_of(words, bits):
    bit = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    return (bit.reshape(*words.shape[:-1], -1, bits) << np.arange(bits, dtype=np.uint8)).sum(-1)


@pytest.mark.parametrize("of", OF)
@pytest.mark.parametrize(("group", "width", "bits"), [(128, 128, 4), (64, 64, 2), (64, 256, 4)])
def test_the_reference_is_the_definition(rng, group, width, bits, of):
    x = uneven(rng, (2,), group, width)
    tiles = reference.quantize_tiles(x, bits, group, of)
    back = reference.dequantize_tiles(*tiles, bits, of)
    for i, tile in enumerate(x):
        codes, stands_for = by_definition(tile, bits, of)
        differences = abs(codes - codes_of(tiles[0][i, 0], bits))
        assert differences.max() <= 1
        assert differences.mean() < 1e-3, "only ties may be rounded to the other side"
        error = abs(back[i] - stands_for).max() / abs(stands_for).max()
        assert error < 2.0**-7 or differences.max() > 0


def test_zeros_stay_zeros():
    for of in OF:
        zeros = reference.quantize_tiles(np.zeros((64, 32), np.float32), 4, 64, of)
        assert not reference.dequantize_tiles(*zeros, 4, of).any()


def test_few_bits_lose_less_than_groups_of_columns(rng):
    """What balancing is for: on uneven tiles its 4 bits lose less than mlx's, which take as many bits."""
    x = uneven(rng, (), 128, 128)
    tiles = reference.dequantize_tiles(*reference.quantize_tiles(x, 4, 128, "keys"), 4, "keys")
    groups = reference.dequantize_groups(*reference.quantize_groups(x, 4, 64, "affine"), 4, "affine")
    size = np.linalg.norm(x, axis=1)
    lost = [np.linalg.norm(y - x, axis=1) / size for y in (tiles, groups)]
    assert lost[0].mean() < lost[1].mean()
