"""Attention and rotation in plain NumPy, as the peers define them: what their functions are compared with."""

import numpy as np


def softmax_attention(q, k, v, scale, mask, softcap=0.0, bias=0.0):
    """Attention of q (Sq, D) over k (S, D), v (S, D) under mask (Sq, S): float64, and the LSE."""
    scores = q.astype(np.float64) @ k.astype(np.float64).T * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(mask, scores + bias, -np.inf)
    top = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), -1e300)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return weights / np.maximum(total, 1e-300) @ v.astype(np.float64), (top + np.log(total))[..., 0]


def rotate(x, positions, cos, sin, interleaved):
    """One row x (H, D) after another, pair by pair."""
    x = x.astype(np.float32).copy()
    half = cos.shape[1]
    for s, position in enumerate(positions):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            x0, x1 = x[s, :, a].copy(), x[s, :, b].copy()
            x[s, :, a] = x0 * cos[position, i] - x1 * sin[position, i]
            x[s, :, b] = x1 * cos[position, i] + x0 * sin[position, i]
    return x
