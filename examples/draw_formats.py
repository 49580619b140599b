"""Draw the memory of live stores: layouts.svg, formats.svg and exact.svg in docs/ of this repository.

python examples/draw_formats.py [--out FOLDER]
"""

import argparse
import pathlib
import sys
from html import escape

import ml_dtypes
import numpy as np

import tikv

# class: (light, dark)
COLOURS = {
    "panel": ("fill:#ffffff;stroke:#d0d7de", "fill:#0d1117;stroke:#3d444d"),
    "ink": ("fill:#1f2328", "fill:#f0f6fc"),
    "soft": ("fill:#59636e", "fill:#9198a1"),
    "plain": ("fill:#f6f8fa;stroke:#d0d7de", "fill:#151b23;stroke:#3d444d"),
    "same": ("fill:#54aeff;stroke:#0969da", "fill:#1f6feb;stroke:#58a6ff"),
    "rounded": ("fill:#eac54f;stroke:#9a6700", "fill:#9e6a03;stroke:#e3b341"),
    "given": ("fill:none;stroke:#8c959f;stroke-width:3", "fill:none;stroke:#656c76;stroke-width:3"),
    "kept": ("fill:none;stroke:#0969da;stroke-width:1.5", "fill:none;stroke:#58a6ff;stroke-width:1.5"),
}
FORMATS = (
    "int8", "float8_e4m3fn", "float8_e5m2", tikv.Quant(bits=4, group=32), "q4_0", tikv.Quant(bits=2, group=32),
    "mxfp8", "mxfp4", "nvfp4", tikv.Quant(bits=4, group=32, rotate="hadamard"),
    tikv.Quant(bits=2, group=32, rotate="hadamard"), tikv.Quant(bits=2, group=32, axis="tokens", residual=32),
)  # fmt: skip
VALUES = (
    ("1/3", 1 / 3),
    ("minus zero", -0.0),
    ("a subnormal number", 1e-40),
    ("65,520", 65520.0),
    ("NaN with a mark", np.array(0x7FC01234, np.uint32).view(np.float32)),
)
STEP, HALF = 4.5, 70  # pixels of a value's width, and of 1
STORED = ("float32", "float16", "bfloat16", "float8_e4m3fn")


def text(x: float, y: float, words: object, kind: str = "ink", size: int = 12, anchor: str = "start") -> str:
    """Words that begin, have their middle or end at x."""
    place = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(str(words))}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """A rectangle."""
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>'


def picture(width: int, height: int, title: str, parts: list[str]) -> str:
    """The parts on a panel that follows the reader's light or dark setting."""
    light, dark = ("".join(f".{name}{{{both[i]}}}" for name, both in COLOURS.items()) for i in (0, 1))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="ui-sans-serif, system-ui, Helvetica, Arial, sans-serif">',
            f"<title>{escape(title)}</title>",
            f"<style>{light}@media (prefers-color-scheme:dark){{{dark}}}</style>",
            box(0.5, 0.5, width - 1, height - 1, "panel"),
            text(16, 28, title, size=15),
            *parts,
            "</svg>",
            "",
        ]
    )


def staircase(left: float, middle: float, values: np.ndarray) -> str:
    """A path with a level step for each value."""
    points = [(left + STEP * (n + 1), middle - HALF * value) for n, value in enumerate(values)]
    moves = "".join(f"V{y:.1f}H{x:.1f}" for x, y in points)
    return f'<path class="kept" d="M{left} {points[0][1]:.1f}{moves}"/>'


def layouts() -> str:
    """The memory of K in the order of its addresses: as given, and as stores and pools keep it."""
    tokens, heads, slots = 3, 2, 4
    ids = 1 + np.arange(tokens * heads, dtype=np.float32).reshape(tokens, heads, 1)  # 0 is a free slot
    kept = [("given to append: token-major (tokens, heads, width)", ids)]
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=heads, head_dim=1, capacity=slots, dtype="float32")
    store.keys(0).numpy()[:] = 0
    store.append(0, ids, ids)
    kept.append(("a store: head-major (heads, slots, width)", store.keys(0).numpy()))
    for layout, shape in (("NHD", "slots, heads"), ("HND", "heads, slots")):
        pool = tikv.PagedKVCacheStore(
            num_layers=1, num_kv_heads=heads, head_dim=1, num_blocks=2, block_size=2, layout=layout, dtype="float32"
        )
        pool.keys(0).numpy()[:] = 0
        pool.append(0, ids, ids, [pool.add()], cu_seqlens=[0, tokens])
        kept.append((f'a pool of blocks of 2 slots, layout="{layout}": (blocks, {shape}, width)', pool.keys(0).numpy()))
    parts = []
    for i, (name, memory) in enumerate(kept):
        top = 48 + 72 * i
        parts.append(text(16, top + 12, name))
        for at, number in enumerate(memory.ravel().astype(int)):
            token, head = divmod(number - 1, heads)
            x = 16 + 112 * at
            parts.append(box(x, top + 22, 108, 30, "plain" if number == 0 else ("same", "rounded")[head]))
            words = "free" if number == 0 else f"token {token}, head {head}"
            parts.append(text(x + 54, top + 41, words, "soft" if number == 0 else "ink", 11, "middle"))
    return picture(928, 340, "Keys of three tokens and two heads, in the order of memory", parts)


def kept_of(dtype: str | tikv.Quant, row: np.ndarray) -> tuple[np.ndarray, str]:
    """What a store keeps of a row of keys, or of a channel of the keys of so many tokens, and how large it is."""
    along_tokens = isinstance(dtype, tikv.Quant) and dtype.axis == "tokens"
    keys = np.repeat([*row, 0], 64).reshape(65, 1, 64) if along_tokens else row[None, None]  # one more: a group is full
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=64, capacity=max(8, len(keys)), dtype=dtype)
    store.append(0, keys.astype(np.float32), keys.astype(np.float32))
    tokens = store.tokens(0)[0].numpy().astype(np.float32)[0, 0]
    if along_tokens:
        return tokens[:64, 0], "a channel of 64 tokens, the newest 32 in float16"
    return tokens[
        0
    ], f"{store.nbytes / 2 / store.capacity:g} bytes a row, largest error {abs(tokens[0] - row).max():.2g}"


def name_of(dtype: str | tikv.Quant) -> str:
    """What one writes for it, as short as it is clear."""
    if isinstance(dtype, str):
        return dtype
    more = f', rotate="{dtype.rotate}"' if dtype.rotate else f', axis="{dtype.axis}"' if dtype.residual else ""
    return f"Quant(bits={dtype.bits}, group={dtype.group}{more})"


def formats() -> str:
    """A row of 64 values from -1 to 1, and what each format keeps of it."""
    row = np.linspace(-1, 1, 64, dtype=np.float32)
    parts = []
    for i, dtype in enumerate(FORMATS):
        kept, words = kept_of(dtype, row)
        left, top = 16 + i % 3 * 304, 48 + i // 3 * 210
        middle = top + 42 + HALF
        parts += [
            box(left, top + 36, 64 * STEP, 2 * HALF + 12, "plain"),
            f'<path class="given" d="M{left} {middle + HALF}L{left + 64 * STEP} {middle - HALF}"/>',
            staircase(left, middle, kept),
            text(left, top + 12, name_of(dtype)),
            text(left, top + 28, words, "soft", 11),
        ]
    end = 56 + -(-len(FORMATS) // 3) * 210
    legend = "q4_0, mxfp and Quant have a scale for each group of 32 values, nvfp4 for 16"
    parts += [
        f'<path class="given" d="M16 {end}h22"/>', text(44, end + 4, "given: 64 values from -1 to 1", "soft", 11),
        f'<path class="kept" d="M236 {end}h22"/>', text(264, end + 4, "kept", "soft", 11),
        text(316, end + 4, legend, "soft", 11),
    ]  # fmt: skip
    return picture(928, end + 20, f"One row of keys, as {len(FORMATS)} stores keep it", parts)


def stored_bits(dtype: str) -> list[str]:
    """The bits that a store keeps of each of the values, as hexadecimal digits."""
    values = np.array([value for _, value in VALUES], np.float32)
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=len(values), capacity=1, dtype=dtype)
    store.append(0, values.reshape(1, 1, -1), values.reshape(1, 1, -1))
    kept = store.keys(0).numpy().ravel()
    size = kept.dtype.itemsize
    return [f"{bits:0{2 * size}x}" for bits in kept.view(f"u{size}")]


def exact() -> str:
    """The bits of some values in four stores, and all rows of a memory of which an append changed some."""
    given = [f"{bits:08x}" for bits in np.array([value for _, value in VALUES], np.float32).view(np.uint32)]
    parts = [text(16, 62, "given, float32", "soft", 11)]
    for n, (name, _) in enumerate(VALUES):
        parts += [text(16, 96 + 30 * n, name), text(270, 96 + 30 * n, given[n], "soft", anchor="end")]
    for column, dtype in enumerate(STORED):
        x = 300 + 155 * column
        parts.append(text(x + 70, 62, f"in a store of {dtype}", "soft", 11, "middle"))
        for n, bits in enumerate(stored_bits(dtype)):
            parts.append(box(x, 78 + 30 * n, 140, 26, "same" if bits == given[n] else "rounded"))
            parts.append(text(x + 70, 96 + 30 * n, bits, anchor="middle"))
    legend = "converted: rounded once, to the nearest; NaN to some NaN; float8 saturates"
    parts += [box(300, 238, 13, 13, "same"), text(319, 249, "the same bits", "soft", 11)]
    parts += [box(420, 238, 13, 13, "rounded"), text(439, 249, legend, "soft", 11)]

    heads, slots = 4, 24
    store = tikv.KVCacheStore(
        num_layers=1, num_kv_heads=heads, head_dim=16, capacity=64, dtype="bfloat16", window=slots, sinks=2
    )
    rng = np.random.default_rng(0)
    store.append(0, *rng.standard_normal((2, 45, heads, 16), np.float32))
    memory = store.keys(0).numpy().view(np.uint16)[0]
    memory[:] = rng.integers(0, 1 << 16, memory.shape, np.uint16)
    before = memory.copy()
    rows = rng.standard_normal((3, heads, 16), np.float32)
    store.append(0, rows, rows)
    changed = (memory != before).any(axis=-1)
    wanted = np.moveaxis(rows.astype(ml_dtypes.bfloat16).view(np.uint16), 0, 1)
    right = sum(int((memory[h] == row).all(axis=-1).sum()) for h in range(heads) for row in wanted[h])
    about = f"All keys of a ring of {slots} slots, 2 of them sinks. Its memory was full of random bits; then"
    parts.append(text(16, 288, f"{about} {len(rows)} tokens were appended.", size=13))
    for h in range(heads):
        parts.append(text(16, 321 + 26 * h, f"head {h}", "soft", 11))
        parts += [box(70 + 34 * s, 305 + 26 * h, 30, 22, "same" if changed[h, s] else "plain") for s in range(slots)]
    parts += [text(85 + 34 * s, 420, s, "soft", 9, "middle") for s in range(slots)]
    found = f"{changed.sum()} rows changed, and {right} are those given; in the other {(~changed).sum()} no bit changed"
    parts.append(text(16, 444, found, "soft", 11))
    return picture(928, 462, "What a write keeps, and what it leaves alone", parts)


def main() -> None:
    """Draw all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs"), metavar="FOLDER")
    options = parser.parse_args()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        tikv.init("cpu")
        for make in (layouts, formats, exact):
            svg = make()
            (options.out / f"{make.__name__}.svg").write_text(svg, encoding="utf-8")
    except OSError as error:
        parser.error(f"--out {options.out}: {error}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
