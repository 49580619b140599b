"""Pictures: well-formed, bounded, escaped, and with the positions, slots and blocks that the store really has."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import oracle
import pytest

import tikv
from tikv import reference
from tikv.stores import picture

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def words(svg):
    """The texts of a picture in the order in which they are drawn."""
    return [node.text for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def kinds(svg):
    """The class of each cell, without the legend, whose cells are 13 pixels wide."""
    nodes = [n for n in ElementTree.fromstring(svg).iter() if n.tag in (f"{SVG}rect", f"{SVG}path")]
    return [n.get("class").removeprefix("tk-") for n in nodes if n.get("width") != "13.0"]


def wheel(svg, sinks):
    """{slot: position} of a picture of a single ring: its cells in order, and the numbers of those that are filled."""
    cells = [n.get("class") for n in ElementTree.fromstring(svg).iter(f"{SVG}path") if n.get("class") != "tk-next"]
    filled = sum(cell != "tk-empty" for cell in cells)
    numbers = iter([int(word) for word in words(svg) if word.isdigit()][-filled:] if filled else [])
    return {slot: None if cell == "tk-empty" else next(numbers) for slot, cell in enumerate(cells, sinks)}


def store(**form):
    form = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "capacity": 8, "dtype": "float32"} | form
    return tikv.KVCacheStore(**form)


def grow(cache, tokens):
    """Append rows whose value is their position."""
    rows = np.arange(cache.length, cache.length + tokens, dtype=np.float32).reshape(1, tokens, 1, 1)
    cache.append_all(*np.broadcast_to(rows, (2, cache.num_layers, tokens, 1, 1)).copy())


@pytest.mark.parametrize(("tokens", "trimmed"), [(0, 0), (2, 0), (5, 0), (6, 0), (7, 0), (23, 0), (23, 3), (4, 4)])
@pytest.mark.parametrize("sinks", [0, 2])
def test_a_ring_shows_what_the_memory_holds(arch, tokens, trimmed, sinks):
    cache = store(window=6, sinks=sinks)
    grow(cache, tokens)
    cache.trim(trimmed)
    memory = oracle.to_numpy(cache.keys(0)).ravel()
    kept = oracle.to_numpy(cache.tokens(0)[0]).ravel().tolist()
    where = {slot: int(memory[slot]) for slot in range(6) if memory[slot] in kept and slot in filled_slots(cache)}
    numbers = [int(word) for word in words(cache.draw()) if word.isdigit()]
    assert sorted(numbers) == sorted({*range(min(sinks, cache.length)), *where.values()}), "only positions"
    assert wheel(cache.draw(), sinks) == {slot: where.get(slot) for slot in range(sinks, 6)}


def filled_slots(cache):
    """By the rule of the oracle, the slots of the positions that can be read: sinks, and the newest behind them."""
    return {reference.slots(int(p), 1, 6, window=6, sinks=cache.sinks)[0] for p in cache.positions(0)[0, 0]}


def test_newest_next_and_sinks_are_marked(arch):
    cache = store(window=6, sinks=2)
    grow(cache, 13)
    found = kinds(cache.draw())
    assert (found.count("sink"), found.count("newest"), found.count("held"), found.count("next")) == (2, 1, 3, 1)
    texts = words(cache.draw())
    assert "holds positions 0-1 and 9-12" in texts
    assert "layer 0: window 6, 2 sinks" in texts
    assert {"13 tokens", "ring of 4", "full 2×"} <= set(texts)


def test_a_picture_has_only_positions_and_says_so(arch):
    cache = store(window=[None, 6], num_layers=2)
    grow(cache, 3)
    texts = words(cache.draw())
    assert [word for word in texts if word.isdigit()] == ["0", "1", "2"] * 2
    assert any(word.startswith("A number is the position of the token in that slot.") for word in texts)


def test_layers_in_one_state_share_a_drawing(arch):
    cache = store(num_layers=5, window=[4, None, 4, 4, None])
    grow(cache, 7)
    texts = words(cache.draw())
    assert "layers 0, 2-3: window 4" in texts
    assert "layers 1, 4: capacity 8" in texts
    many = store(num_layers=6, window=[1, 2, 3, 4, 5, 6])
    assert "and 2 other states" in words(many.draw())


def test_holes_heads_and_true_positions_are_drawn(arch):
    cache = store(num_layers=2, num_kv_heads=2, capacity=8)
    rows = np.zeros((2, 6, 2, 1), np.float32)
    cache.append_all(rows, rows)
    cache.compact(0, [[[0, 1, 4], [2, 3, 5]]])
    cache.compact(1, [[[0, 1, 4], [0, 1, 4]]])
    cache.append_all(rows[:, :1], rows[:, :1])
    texts = words(cache.draw())
    assert "layer 0, head 0: capacity 8" in texts
    assert "layer 1: capacity 8" in texts
    assert texts.count("holds positions 0-1, 4, 6") == 2
    assert "holds positions 2-3, 5-6" in texts
    mass = np.array([[[0, 1, 0, 0], [0, 0, 0, 0.5]]], np.float32)
    for given in (mass, {0: mass}):
        svg = cache.draw(mass=given)
        assert "most mass" in words(svg)
        assert svg.count('fill-opacity="0.96"') == 3, "the most of two heads, and the legend"
    with pytest.raises(tikv.ShapeError, match=r"^KVCacheStore.draw: mass is f32\[1,2,3\]"):
        cache.draw(mass=mass[..., :3])


@pytest.mark.parametrize("window", [None, 1_000_000])
def test_a_huge_store_is_a_small_picture(arch, window):
    cache = store(capacity=1_000_000, window=window)
    rows = np.zeros((1, 500_000, 1, 1), np.float32)
    for _ in range(5 if window else 1):
        cache.append_all(rows, rows)
    svg = cache.draw()
    assert len(svg) < 30_000
    texts = words(svg)
    assert "…" in texts
    newest = 2_499_999 if window else 499_999
    assert str(newest) in texts
    assert kinds(svg).count("newest") == kinds(svg).count("next") == 1


def pool_of(**form):
    form = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 2, "num_blocks": 12, "block_size": 4} | form
    return tikv.PagedKVCacheStore(**form)


def extend(pool, seq, tokens):
    rows = np.ones((tokens, 1, 2), np.float16)
    pool.append(0, rows, rows, [seq], cu_seqlens=[0, tokens])


def test_a_page_table_shows_blocks_sharing_and_room(arch):
    pool = pool_of()
    a = pool.add()
    extend(pool, a, 10)
    b = pool.fork(a)
    extend(pool, b, 3)
    svg = pool.draw()
    assert words(svg)[2:] == [
        "page table: the numbers of blocks of 4 tokens, in order",
        *("sequence 0", "10 tokens", "0 ×2", "1 ×2", "2"),
        *("sequence 1", "13 tokens", "0 ×2", "1 ×2", "3", "4"),
        "pool: 12 blocks, 7 free",
        *(str(block) for block in range(12)),
        *("held by one sequence", "shared, × its holders", "free"),
    ]
    assert [words(svg)[i] for i in (5, 6, 7)] == [f"{i} ×2" if i < 2 else str(i) for i in pool.block_table(a)]
    found = kinds(svg)
    # Every block of a table has a frame below what fills it; four are drawn twice as shared, and two in the pool.
    assert (found.count("shared"), found.count("held"), found.count("empty")) == (4 + 2, 3 + 3, 7 + 7)
    pool.swap_out(b)
    assert "swapped out to the host" in words(pool.draw())
    pool.free(a)
    assert "pool: 12 blocks, 12 free" in words(pool.draw())


def test_a_huge_pool_is_a_small_picture(arch):
    pool = pool_of(num_blocks=100_000)
    for _ in range(30):
        extend(pool, pool.add(), 400)
    svg = pool.draw()
    assert len(svg) < 80_000
    assert {"…", "and 18 more sequences", "pool: 100000 blocks, 97000 free"} <= set(words(svg))


def test_stores_draw_themselves_in_notebooks_and_to_files(arch, tmp_path):
    cache, pool = store(window=4), pool_of()
    for each in (cache, pool):
        assert each._repr_html_() == each.draw(tmp_path / "picture.svg")
        assert (tmp_path / "picture.svg").read_text(encoding="utf-8") == each.draw()
        with pytest.raises(tikv.OptionError, match=r"does not end in \.svg or \.png"):
            each.draw(tmp_path / "picture.gif")
        with pytest.raises(tikv.CacheFileError, match="there is no folder"):
            each.draw(tmp_path / "no" / "picture.svg")


def test_a_picture_is_written_as_png(arch, tmp_path):
    pytest.importorskip("resvg_py")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    cache, pictures = store(window=4), []
    for tokens in (0, 9):
        grow(cache, tokens)
        svg = ElementTree.fromstring(cache.draw(tmp_path / "picture.png"))
        pictures.append(pyplot.imread(tmp_path / "picture.png"))
        assert pictures[-1].shape[:2] == (2 * int(svg.get("height")), 2 * int(svg.get("width")))
    assert pictures[0][:100].min() < 0.5  # the title's letters
    assert (pictures[0] != pictures[1]).any()


def test_png_without_its_packages_names_the_extra(arch, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(tikv.MissingPackageError, match=r"as PNG needs resvg_py.*taichi-kv\[plot\]"):
        store(window=4).draw(tmp_path / "picture.png")
    assert list(tmp_path.iterdir()) == []


def test_text_is_escaped():
    svg = picture.slots("<&>(\"'</svg>)", [picture.Slots("<b>", 2, 0, True, 1, 0)])
    assert words(svg)[:2] == ["<&>", "\"'</svg>"]
    assert words(svg)[2] == "<b>: window 2"


def test_both_themes_style_the_same_classes():
    style = re.search(r"<style>(.*)@media \(prefers-color-scheme:dark\)\{(.*)\}</style>", picture.slots("x", []))
    light, dark = (re.findall(r"\.(tk-[a-z]+)\{", part) for part in style.groups())
    assert light == dark
    used = set(
        re.findall(r'class="(tk-[a-z]+)"', picture.bars("x", "y", [picture.Bars("a", {"tikv": 1}, {"tikv": "1"}, 2)]))
    )
    assert used
    assert used <= set(light)


def test_bars_are_on_the_scale_of_their_roof():
    svg = picture.bars("t", "n", [picture.Bars("g", {"tikv": 50.0, "torch": 25.0}, {"tikv": "a", "torch": "b"}, 100.0)])
    found = [(n.get("class"), float(n.get("width"))) for n in ElementTree.fromstring(svg).iter(f"{SVG}rect")][1:]
    assert found == [("tk-tikv", 215.0), ("tk-torch", 107.5)]


def timed_row(name, peer, case, us, moved):
    rate = moved / us / 1e3
    info = {"arch": "cpu", "op": name, "peer": peer, "case": case, "us": us, "bytes_moved": moved, "launch_us": 2.0}
    info |= {"gb_per_s": rate, "roof_gb_per_s": 20.0, "pct_of_copy": rate * 5}
    return {"name": f"bench_{name}[cpu-{peer}]", "extra_info": info}


def test_the_report_draws_rates_roofline_and_latency_in_both_themes(tmp_path):
    pytest.importorskip("matplotlib")
    about = {"devices": {"cpu": "a <device>"}, "versions": {"numpy": "2"}, "cores": 2, "load": 0.5, "system": "S"}
    about |= {"python": "3", "date": "2000-01-01"}
    rows = [timed_row("prefill", peer, "float16", us, 1 << 24) for peer, us in (("tikv", 1000.0), ("torch", 4321.0))]
    rows += [timed_row("append_all", peer, "1 token", us, 4096) for peer, us in (("tikv", 5.0), ("numpy", 1234.0))]
    rows += [timed_row("update", peer, "2000", us, 4096) for peer, us in (("tikv", 5.0), ("Other", 77.0))]
    data = {"machine_info": {"tikv": about | {"commit": "c"}}, "datetime": "2000-01-01T", "benchmarks": rows}
    (tmp_path / "bench.json").write_text(json.dumps(data))
    command = [
        sys.executable,
        str(ROOT / "benches/report.py"),
        str(tmp_path / "bench.json"),
        "--svg",
        "docs/performance",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert child.returncode == 0, child.stderr
    assert "| cpu | prefill, float16 | 16.8 |" in child.stdout
    assert "| cpu | append all, 1 token | 5.0 | 2.0 |  |  | 1,234 |  |" in child.stdout
    assert child.stdout.rstrip().endswith("| cpu | update, 2000 | 5.0 | 2.0 |  |  |  | Other 77.0 |")
    drawn = [(tmp_path / f"docs/performance-{theme}.svg").read_text(encoding="utf-8") for theme in ("light", "dark")]
    for svg, ink in zip(drawn, ("#1f2328", "#e6edf3"), strict=True):
        assert ElementTree.fromstring(svg).tag == f"{SVG}svg"
        assert ink in svg
        # matplotlib writes each text as a comment above its outlines.
        for text in (
            "float16",
            "1 token",
            " 16.8",
            " 3.9",
            " 1,234",
            "roofline of every write; dashed: one empty launch, 2.0 us",
        ):
            assert f"<!-- {text} -->" in svg, text
    assert "#e6edf3" not in drawn[0]


@pytest.mark.archs("cpu")
@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "names"),
    [("draw_store.py", ["heads", "pages", "ring", "slots"]), ("draw_formats.py", ["exact", "formats", "layouts"])],
)
def test_the_pictures_of_the_manual_are_drawn_from_stores(arch, tmp_path, script, names):
    child = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.returncode == 0, child.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.svg" for name in names]
    for name in names:
        kept, drawn = (folder / f"{name}.svg" for folder in (ROOT / "docs", tmp_path))
        assert kept.read_text(encoding="utf-8") == drawn.read_text(encoding="utf-8"), f"run {child.args[1]}"
