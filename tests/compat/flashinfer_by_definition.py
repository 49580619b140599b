"""Attention of one request as FlashInfer defines it, in float64."""

import numpy as np
from peers_by_definition import softmax_attention


def rotated(x, positions, rope_scale=1.0, theta=1e4):
    """Rows x (n, H, D) of ROPE_LLAMA: the pair (i, i + D / 2) turns by position / rope_scale * theta ** (-2i / D)."""
    x, half = x.astype(np.float64), x.shape[-1] // 2
    out = x.copy()
    for i in range(half):
        angle = np.asarray(positions) / rope_scale * theta ** (-2 * i / x.shape[-1])
        c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
        out[..., i] = x[..., i] * c - x[..., i + half] * s
        out[..., i + half] = x[..., i + half] * c + x[..., i] * s
    return out


def slopes_of(heads):
    """The slopes of ALIBI: a geometric series for a power of two of the heads, and every other one between after it."""
    power = 1
    while 2 * power <= heads:
        power *= 2
    first = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return first + [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]


def attention(q, k, v, scale=None, causal=False, window=-1, softcap=0.0, mode="NONE", mask=None, rope=(1.0, 1e4)):
    """(out, lse of base 2) of q (n, Hq, D) over k (m, H, D) and v (m, H, D_v)."""
    n, m, heads = len(q), len(k), q.shape[1]
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    own, keys = np.arange(m - n, m)[:, None], np.arange(m)
    if mode == "ROPE_LLAMA":
        q, k = rotated(q, own[:, 0], *rope), rotated(k, keys, *rope)
    seen = np.ones((n, m), bool)
    if mask is not None:
        seen &= mask
    elif causal:
        seen &= keys <= own
    if window >= 0:
        seen &= keys >= own - window
    out, lse = np.zeros((n, heads, v.shape[-1])), np.zeros((n, heads))
    for h in range(heads):
        # The distance is that from the query's number in the chunk, as in FlashInfer's kernels.
        bias = slopes_of(heads)[h] * (keys - np.arange(n)[:, None]) if mode == "ALIBI" else 0.0
        of_head = h // (heads // k.shape[1])
        out[:, h], lse[:, h] = softmax_attention(q[:, h], k[:, of_head], v[:, of_head], scale, seen, softcap, bias)
    return out, lse / np.log(2)
