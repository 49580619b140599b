"""How exact is attention in 8 bits? Errors of both values of `tikv.init(attention_bits=)`, on several distributions.

    python examples/attention_bits.py
    python examples/attention_bits.py --tokens 4096 --queries 64 --width 64

K and V are stored as int8, with a scale for each row, or as float8_e4m3fn. An error is the root mean square of the
difference from attention in float64 over the numbers before they were stored, divided by the root mean square of the
result. "stored" is what storing K and V alone costs; "16 bits" also rounds q, and the numbers and weights that products
take, to float16; "8 bits" is the definition in `tikv.reference.attention`. "rotated": q and K are multiplied by a
Hadamard matrix before K is stored, which changes no score and spreads outliers over all columns.

The program computes with NumPy, and so needs no GPU.
"""

import argparse

import ml_dtypes
import numpy as np

from tikv import reference

DTYPES = {"int8": np.int8, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}


def distributions(rng: np.random.Generator, queries: int, tokens: int, width: int) -> dict[str, list[np.ndarray]]:
    """q, k and v of each distribution."""
    shapes = [(queries, width), (tokens, width), (tokens, width)]
    normal = lambda: [rng.standard_normal(shape) for shape in shapes]  # noqa: E731
    outliers, peaked = normal(), normal()
    channels = rng.choice(width, 4, replace=False)
    for rows in outliers[:2]:
        rows[:, channels] *= 8
    peaked[0] *= 4
    return {
        "normal": normal(),
        "heavy tails (Student's t, 3)": [rng.standard_t(3, shape) for shape in shapes],
        "4 columns of q and K are 8 times as large": outliers,
        "scores are 4 times as large": peaked,
    }


def stored(rows: np.ndarray, name: str) -> np.ndarray:
    """The numbers that are read back."""
    if name == "int8":
        return reference.dequantize(*reference.quantize(rows.astype(np.float32))).astype(np.float64)
    return rows.astype(np.float32).astype(DTYPES[name]).astype(np.float64)


def in_halves(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """One query's result, of numbers and weights of float16."""
    q, k, v = (a.astype(np.float16).astype(np.float64) for a in (q, k, v))
    scores = scale * (k @ q)
    weights = np.exp(scores - scores.max())
    return weights.astype(np.float16).astype(np.float64) @ v / weights.sum()


def errors(q: np.ndarray, k: np.ndarray, v: np.ndarray, name: str, rotated: bool) -> list[float]:
    """Errors of "stored", of "16 bits" and of "8 bits"."""
    scale, dtype = q.shape[-1] ** -0.5, DTYPES[name]
    want = np.array([reference.attention(row, k, v, scale=scale)[0] for row in q])
    if rotated:
        q, k = (reference.hadamard(rows.astype(np.float32)).astype(np.float64) for rows in (q, k))
    k, v = stored(k, name), stored(v, name)
    q = q.astype(np.float16).astype(np.float64)
    found = [
        [reference.attention(row, k, v, scale=scale)[0] for row in q],
        [in_halves(row, k, v, scale) for row in q],
        [reference.attention(row, k, v, scale=scale, code_dtype=dtype)[0] for row in q],
    ]
    return [float(np.sqrt(np.mean((np.array(rows) - want) ** 2) / np.mean(want**2))) for rows in found]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--queries", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    asked = parser.parse_args()
    print("| q, K and V | K and V are stored in | rotated | stored | 16 bits | 8 bits |")
    print("| --- | --- | --- | --- | --- | --- |")
    rng = np.random.default_rng(0)
    for title, arrays in distributions(rng, asked.queries, asked.tokens, asked.width).items():
        for name in DTYPES:
            for rotated in (False, True):
                of_each = " | ".join(f"{100 * error:.2f} %" for error in errors(*arrays, name, rotated))
                print(f"| {title} | {name} | {'yes' if rotated else 'no'} | {of_each} |", flush=True)


if __name__ == "__main__":
    main()
