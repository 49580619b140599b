"""examples/: the model is the one its files describe, and a cache changes how fast it writes, never what."""

import importlib
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

from shared.model import FILE_START, OTHER, Model, Tokenizer, attention  # noqa: E402

# Models, stores and attention that other files test, put together.
pytestmark = pytest.mark.thorough

PROMPTS = [
    "class Cache:\n    def __init__(self",
    "import os\nimport sys\n\n",
    "def main():\n",
    "",
    "# The queue is full\nif self.",
    "try:\n    from _json import scanner\nexcept ImportError:\n" * 6,  # longer than the window
]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.load(EXAMPLES / "model")


def encode(model, prompt):
    return model.tokenizer.encode(FILE_START + prompt)


def remember(model, capacity, dtype="float32", cache="contiguous", attention="numpy"):
    from shared.memory import PagedMemory, StoreMemory, pool_for

    if cache == "contiguous":
        return StoreMemory(model, capacity, dtype, attention)
    pool = pool_for(model, -(-capacity // 16), dtype)
    return PagedMemory(model, pool, [pool.add()], attention)


def greedy(model, prompt, count, **kind):
    """The tokens generate.py would write, and the logits each was taken from."""
    from generate import cached

    seen = []

    def choose(logits):
        seen.append(logits)
        return int(logits.argmax())

    memory = remember(model, len(prompt) + count, **kind)
    tokens = [token for _, token in zip(range(count), cached(model, prompt, memory, choose), strict=False)]
    return tokens, np.array(seen), memory


def recomputed_logits(model, ids):
    from shared.memory import NoMemory

    return model.forward(ids, 0, NoMemory(model))


def run(*arguments, script="generate.py", timeout=120):
    return subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_every_file_is_a_program(name):
    """It has `--help`, and does something when it is run; what it shares with others is in a folder."""
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    assert 'if __name__ == "__main__":' in text
    assert "argparse" in text


@pytest.mark.parametrize("name", ["generate.py", "speculative.py", "formats.py", "train.py"])
def test_programs_that_share_files_have_help(name):
    result = run("--help", script=name)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage:")


@pytest.mark.full("vulkan", unless=lambda case: case["prompt"] == PROMPTS[-1])
@pytest.mark.full(unless=lambda case: case["prompt"] in (PROMPTS[0], PROMPTS[-1]))
@pytest.mark.parametrize("prompt", PROMPTS, ids=range(len(PROMPTS)))
def test_cached_text_is_the_recomputed_text_past_the_window(model, prompt, arch):
    ids = encode(model, prompt)
    tokens, logits, memory = greedy(model, ids, 150)
    whole = recomputed_logits(model, ids + tokens[:-1])[len(ids) - 1 :]
    assert tokens == whole.argmax(axis=1).tolist()
    # float32 sums in another order: the logits are of the order of 10 and go through four layers.
    np.testing.assert_allclose(logits, whole, atol=2e-3)
    assert memory.store.length == len(ids) + 149 > 2 * model.config["sliding_window"]


@pytest.mark.full("vulkan")
def test_the_comparison_notices_a_ring_that_forgets_one_token_early(model, arch):
    ids = encode(model, PROMPTS[0])
    narrow = Model.load(EXAMPLES / "model")
    narrow.windows = [window and window - 1 for window in model.windows]
    _, logits, _ = greedy(narrow, ids, 100)
    tokens, right, _ = greedy(model, ids, 100)
    filled = model.config["sliding_window"] - len(ids)
    np.testing.assert_array_equal(logits[: filled - 1].argmax(axis=1), tokens[: filled - 1])
    assert np.abs(logits[filled] - right[filled]).max() > 2e-3


@pytest.mark.full("vulkan")
@pytest.mark.full(unless=lambda case: (case["attention"] == "tikv") == (case["cache"] == "paged"))
@pytest.mark.parametrize("attention", ["numpy", "tikv"])
@pytest.mark.parametrize("cache", ["contiguous", "paged"])
def test_every_cache_and_attention_writes_the_recomputed_text(model, cache, attention, arch):
    ids = encode(model, PROMPTS[4])
    tokens, logits, _ = greedy(model, ids, 100, cache=cache, attention=attention)
    whole = recomputed_logits(model, ids + tokens[:-1])[len(ids) - 1 :]
    assert tokens == whole.argmax(axis=1).tolist()
    np.testing.assert_allclose(logits, whole, atol=2e-3)


@pytest.mark.full("vulkan")
@pytest.mark.full(unless=lambda case: (case["dtype"], case["cache"]) in (("float16", "contiguous"), ("int8", "paged")))
@pytest.mark.parametrize("cache", ["contiguous", "paged"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 0.05), ("bfloat16", 0.4), ("int8", 1.2)])
def test_narrow_caches_round_and_take_less_memory(model, dtype, tolerance, cache, arch):
    ids = encode(model, PROMPTS[-1])
    tokens, _, exact = greedy(model, ids, 40, cache=cache)
    memory = remember(model, len(ids) + 40, dtype, cache)
    logits = [model.forward(ids, 0, memory)[-1]]
    logits += [model.forward([token], len(ids) + i, memory)[-1] for i, token in enumerate(tokens[:-1])]
    whole = recomputed_logits(model, ids + tokens[:-1])[len(ids) - 1 :]
    # The bound is about what one rounding of every key and value does to logits of the order of 10.
    difference = np.abs(np.array(logits) - whole).max()
    assert 0 < difference < tolerance
    row = model.head_dim * 4
    stored = model.head_dim + 2 if dtype == "int8" else model.head_dim * 2  # int8 with a float16 scale a row
    assert memory.nbytes * row == exact.nbytes * stored


@pytest.mark.full(unless=lambda case: len(case["pieces"]) == 3)
@pytest.mark.parametrize("pieces", [(64, 64), (100, 3, 30), (1, 130), (7,) * 12])
def test_a_prompt_in_pieces_is_the_prompt(model, pieces, arch):
    ids = encode(model, PROMPTS[-1] + PROMPTS[0] * 6)[: sum(pieces)]
    assert len(ids) == sum(pieces)
    memory = remember(model, len(ids))
    rows, position = [], 0
    for length in pieces:
        rows.append(model.forward(ids[position : position + length], position, memory))
        position += length
    np.testing.assert_allclose(np.concatenate(rows), recomputed_logits(model, ids), atol=2e-3)


def test_generate_streams_the_same_text_with_and_without_the_cache():
    with_cache = run("--tokens", "90", "--arch", "cpu", "--greedy")
    without = run("--tokens", "90", "--arch", "cpu", "--greedy", "--no-cache")
    assert with_cache.returncode == 0, with_cache.stderr
    assert without.returncode == 0, without.stderr
    assert with_cache.stdout == without.stdout
    assert with_cache.stdout.startswith("class Cache:\n    def __init__(self")
    assert len(with_cache.stdout) > 150
    for figure in ("tokens/s", "bytes", "a ring of 64 went round 1 times"):
        assert figure in with_cache.stderr
    assert "same text" in without.stderr
    assert "times as fast" in without.stderr


def test_generate_writes_the_same_from_pages():
    pages, rings = (
        run("--tokens", "70", "--arch", "cpu", "--greedy", "--cache", cache) for cache in ("paged", "contiguous")
    )
    assert pages.returncode == 0, pages.stderr
    assert pages.stdout == rings.stdout
    assert "83 tokens in 6 blocks of 16" in pages.stderr


def test_many_prompts_share_blocks_and_write_what_each_writes_alone():
    result = run("--tokens", "12", "--arch", "cpu", script="many_prompts.py")
    assert result.returncode == 0, result.stderr
    assert "blocks held: 26, 10 of them by all 8 prompts; without sharing 96" in result.stderr
    assert "text as each prompt gives it alone: 8 of 8" in result.stderr
    assert result.stdout.count("# ...") == 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "0"], "--tokens 0: must be at least 1"),
        (["--temperature", "-1"], "--temperature -1.0: must be 0 or more"),
        (["--temperature", "nan"], "--temperature nan: must be 0 or more"),
        (["--seed", "-1"], "--seed -1: must be 0 or more"),
        (["--no-repeat", "1"], "--no-repeat 1: must be 0, or at least 2"),
        (["--model", "nowhere"], "no config.json there"),
        (["--arch", "abacus"], "'abacus'"),
    ],
)
def test_generate_says_what_is_wrong(arguments, words):
    result = run(*arguments)
    assert result.returncode != 0
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_the_manual_shows_the_errors_of_attention_in_8_bits():
    """As the program prints them; the last digit may depend on how NumPy adds up."""
    result = run(script="attention_bits.py")
    assert result.returncode == 0, result.stderr
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    table = page.partition("<!-- output: python examples/attention_bits.py -->\n")[2].partition("\n\n")[0]
    shown, printed = ([re.split(r" \| ", line) for line in text.splitlines()] for text in (table, result.stdout))
    assert [row[:3] for row in shown] == [row[:3] for row in printed]
    figures = [[float(cell.split()[0]) for row in rows[2:] for cell in row[3:]] for rows in (shown, printed)]
    assert len(figures[0]) == 48
    np.testing.assert_allclose(*figures, atol=0.02)


def test_many_processes_write_what_one_writes():
    pytest.importorskip("torch.distributed")
    result = run("--tokens", "35", script="many_processes.py", timeout=400)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(": the same text") == 3


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("many_prompts.py", ["--model", "nowhere"], "no config.json there"),
        ("cluster.py", ["--link", "0"], "--link 0.0: must be more than 0"),
        ("many_processes.py", ["--processes", "1"], "--processes 1: must be at least 2"),
        ("draw_store.py", ["--out", str(ROOT / "README.md" / "below")], "--out"),
        ("draw_formats.py", ["--out", str(ROOT / "README.md" / "below")], "--out"),
        ("cuda_graph_decode.py", ["--tokens", "0"], "--tokens 0: must be at least 1"),
        ("cuda_graph_decode.py", ["--layers", "0"], "--layers 0: must be at least 1"),
        ("cuda_graph_decode.py", ["--width", "100"], "--width 100: must be a multiple of 16"),
    ],
)
def test_the_other_examples_say_what_is_wrong(script, arguments, words):
    if script in ("cuda_graph_decode.py", "many_processes.py"):
        pytest.importorskip("torch")
    result = run(*arguments, script=script)
    assert result.returncode == 2, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "0"], "--tokens 0: must be at least 1"),
        (["--dtype", "int32"], "invalid choice: 'int32'"),
        (["nowhere/at/all"], "nowhere/at/all: "),
    ],
)
def test_hf_generate_says_what_is_wrong(arguments, words, monkeypatch, capsys):
    """In this process: a new one would import torch and transformers for ten seconds."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", ["hf_generate.py", *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / "hf_generate.py"), run_name="__main__")
    said = capsys.readouterr().err
    assert end.value.code == 2, said
    assert words in said
    assert "Traceback" not in said


@pytest.fixture
def whole_model(monkeypatch):
    """The example, with a model that is smaller still; in this process, which has imported transformers already."""
    pytest.importorskip("transformers")
    example = importlib.import_module("whole_model")
    tiny = {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1, "vocabulary": 97}
    monkeypatch.setattr(example, "SIZES", {"small": (tiny, 24, "float32"), "large": example.SIZES["large"]})
    return example


@pytest.mark.archs("cpu")
@pytest.mark.filterwarnings("default")
def test_whole_model_compares_time_memory_and_text(whole_model, arch, monkeypatch, capsys, tmp_path):
    file = tmp_path / "runs.json"
    command = ["--device", "cpu", "--tokens", "6", "--rounds", "1", "--formats", "model", "int8", "--window", "20"]
    monkeypatch.setattr(sys, "argv", ["whole_model.py", "--json", str(file), *command])
    whole_model.main()
    (run,) = json.loads(file.read_text())["runs"]
    assert run["command"] == " ".join(["python examples/whole_model.py", *command])
    assert (run["batch"], run["prompt"], run["tokens"]) == (1, 24, 6)
    rows = run["rows"]
    names = ["DynamicCache", "TikvCache", "TikvCache, window 20", "TikvCache, int8", "TikvCache, int8, window 20"]
    assert [row["name"] for row in rows] == names
    numbers = 2 * 2 * 64 * 29  # K and V, layers, width, tokens held
    assert rows[0]["cache_mb"] == numbers * 4 / 1e6
    assert rows[1]["cache_mb"] == 2 * 2 * 64 * 30 * 4 / 1e6
    assert rows[3]["cache_mb"] == 2 * 2 * (64 + 2) * 30 / 1e6
    assert [row["as_dynamic"] for row in rows[:2]] == [6, 6]
    assert [row["as_eager"] for row in rows] == [6] * 5
    for row in rows:
        assert min(row["first_call_s"], row["prompt_ms"]) > 0
        assert row["token_ms"] >= 0
        assert row["later_ms"] > 0
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in names)
    shown = importlib.import_module("whole_models").markdown(json.loads(file.read_text()))
    assert f"| TikvCache, int8 | {rows[3]['prompt_ms']:,.2f} ms" in shown or rows[3]["prompt_ms"] >= 9.995
    lines = whole_model.table([whole_model.Row(**row) for row in rows] + [whole_model.Row("more", failed="no room")])
    assert lines[2].split()[-6:] == ["6", "of", "6"] * 2
    assert lines[-1].split() == ["more", "no", "room"]


def test_whole_model_keeps_one_run_of_each_command(whole_model, tmp_path):
    file = tmp_path / "runs.json"
    for command, batch in (("a", 1), ("b", 2), ("a", 3)):
        whole_model.add(file, {"command": command, "batch": batch})
    assert [(run["command"], run["batch"]) for run in whole_model.runs_of(file)] == [("b", 2), ("a", 3)]


@pytest.mark.archs("cpu")
@pytest.mark.filterwarnings("default")
def test_whole_model_sees_a_cache_that_forgets(whole_model, arch):
    import torch

    class Forgets(whole_model.TikvCache):
        def update(self, keys, values, layer, *args, **kwargs):
            keys, values = super().update(keys, values, layer, *args, **kwargs)
            return keys, values * 0.5 if keys.shape[2] > 24 else values

    model = whole_model.model_of("small", "cpu", torch.float32)
    model.generation_config.eos_token_id = None
    ways = whole_model.ways_of(model.config, ["tikv"], ["model"], 40, None)
    ways.append(whole_model.Way("forgets", lambda: Forgets(model.config)))
    ids = torch.arange(1, 49).reshape(2, 24)
    rows = whole_model.measure(model, ids, ways, 12, 1, lambda what: None)
    assert [row.as_dynamic for row in rows[:2]] == [12, 12]
    assert rows[2].as_dynamic < 12


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "1"], "--tokens 1: must be at least 3"),
        (["--batch", "0"], "--batch 0: must be at least 1"),
        (["--window", "4"], "--window 4: must be more than its 4 sinks"),
        (["--caches", "window"], "--caches window needs --window"),
        (["--formats", "int7"], "invalid choice: 'int7'"),
        (["--json", "nowhere/runs.json"], "--json nowhere/runs.json: nowhere is not a folder"),
        (["--json", str(EXAMPLES / "model" / "config.json")], "it is not a file that --json wrote"),
        (["--json", str(EXAMPLES)], "Is a directory"),
        (["nowhere/at/all"], "nowhere/at/all: "),
    ],
)
def test_whole_model_says_what_is_wrong(whole_model, arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["whole_model.py", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as end:
        whole_model.main()
    said = capsys.readouterr().err
    assert end.value.code == 2, said
    assert words in said


def test_a_tree_of_guesses_writes_the_text_of_plain_decoding(model):
    """In fewer passes than tokens; guesses that begin alike share nodes."""
    from speculative import tree_of, write

    assert tree_of(5, [[1, 2], [1, 3]]) == ([5, 1, 2, 3], [-1, 0, 1, 1])
    prompt = encode(model, PROMPTS[0])
    plain, passes = write(model, prompt, 40, 0, 4)
    assert passes == 40
    text, passes = write(model, prompt, 40, 3, 4)
    assert text == plain
    assert passes < 30


PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("script", PROGRAMS)
def test_every_example_has_help_or_says_what_is_missing(script, tmp_path):
    for name in ("torch", "transformers"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('none here', name='{name}')", encoding="utf-8")
    child = subprocess.run(
        [sys.executable, str(EXAMPLES / script), "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
    )
    if "import torch" in (EXAMPLES / script).read_text(encoding="utf-8"):
        assert child.returncode == 1
        index, clone = r'pip install "taichi-kv\[\1\]"', r'in a clone pip install -e "\.\[\1\]"'
        ours = rf"cannot be used \(none here\)\. Install taichi-kv\[(torch|transformers)\] \({index}; {clone}\)"
        its = r"needs (torch|rich|safetensors): pip install .*; in a clone pip install"
        assert re.search(ours, child.stderr) or re.search(its, child.stderr)
    else:
        assert (child.returncode, "usage: " in child.stdout) == (0, True)
    assert f"python examples/{script}" in child.stdout + child.stderr
    assert "Traceback" not in child.stderr


@pytest.mark.full("vulkan")
def test_a_seed_draws_the_same_text_again(model, arch):
    from generate import Chooser, cached

    ids = encode(model, PROMPTS[0])

    def draw(seed):
        tokens = cached(model, ids, remember(model, 100), Chooser(ids, 0.8, seed))
        return [token for _, token in zip(range(40), tokens, strict=False)]

    assert draw(1) == draw(1) != draw(2)


@pytest.mark.full("vulkan")
def test_no_repeat_writes_no_run_of_tokens_twice(model, arch):
    from generate import Chooser, cached

    ids = encode(model, PROMPTS[0])

    def runs(no_repeat):
        tokens = cached(model, ids, remember(model, 200), Chooser(ids, no_repeat=no_repeat))
        text = ids + [token for _, token in zip(range(120), tokens, strict=False)]
        return [tuple(text[i : i + 5]) for i in range(len(text) - 4)]

    assert len(set(runs(5))) == len(runs(5))
    assert len(set(runs(0))) < len(runs(0))


def test_attention_is_a_softmax_over_the_window(rng):
    tokens, length, window = 5, 9, 4
    q, k, v = (
        rng.standard_normal((tokens, 6, 8)),
        rng.standard_normal((2, length, 8)),
        rng.standard_normal((2, length, 8)),
    )
    got = attention(q, k, v, window)
    for t in range(tokens):
        for head in range(6):
            newest = length - tokens + t
            seen = range(newest - window + 1, newest + 1)
            scores = np.array([q[t, head] @ k[head // 3, s] / 8**0.5 for s in seen])
            weights = np.exp(scores) / np.exp(scores).sum()
            np.testing.assert_allclose(
                got[t, head], sum(w * v[head // 3, s] for w, s in zip(weights, seen, strict=True))
            )


def test_numpy_and_torch_compute_the_same_model(model):
    torch = pytest.importorskip("torch")
    pytest.importorskip("rich")
    from safetensors.torch import load_file
    from train import TorchModel

    weights = {
        name.removeprefix("model."): w.float() for name, w in load_file(EXAMPLES / "model/model.safetensors").items()
    }
    other = TorchModel(model.config)
    other.load_state_dict(weights)
    ids = encode(model, "".join(PROMPTS))
    assert len(ids) > 2 * model.config["sliding_window"]
    with torch.no_grad():
        expected = other(torch.tensor([ids]))[0].numpy()
    np.testing.assert_allclose(recomputed_logits(model, ids), expected, atol=2e-3)


def test_transformers_reads_the_files_as_qwen3(model):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    other = transformers.AutoModelForCausalLM.from_pretrained(EXAMPLES / "model", dtype=torch.float32)
    ids = encode(model, "".join(PROMPTS))
    with torch.no_grad():
        expected = other(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(recomputed_logits(model, ids), expected, atol=2e-3)


@pytest.mark.archs("cpu")
def test_each_way_of_compressing_keeps_its_share(model, arch):
    from compress import WAYS, budgets_by_head, measure

    ids = encode(model, PROMPTS[-1])[:72]
    rows = {(name, share): rest for name, share, *rest in measure(model, [ids], 64, [0.25])}
    assert list(rows) == [("everything", 1.0), *((way, 0.25) for way in WAYS)]
    token = 4 * 2 * 2 * model.head_dim  # bytes of a token in two heads of two layers
    everything = rows["everything", 1.0][0]
    assert rows["everything", 1.0][1] == 0
    for way in WAYS:
        kept, loss, milliseconds = rows[way, 0.25]
        assert everything - kept == (64 - 16) * token, way
        assert abs(loss) < 5
        assert milliseconds > 0
    from compress import Layer

    mass = np.array([[9.0, 8, 7, 6, 5, 4, 3, 2] * 4, [0.1] * 32])
    mask = budgets_by_head(Layer(np.ones((2, 32, 4)), mass, mass), 24)
    assert mask.sum() == 48
    assert mask[0].sum() > mask[1].sum() >= 4, "a head keeps what is safe"


@pytest.mark.archs("cpu")
def test_each_method_by_name_keeps_its_share(model, arch):
    """Also in a second excerpt, after the heads streamed; the table is a file that pages are written from."""
    from compress import NAMED, measure_named, table

    ids = encode(model, PROMPTS[-1])[:72]
    rows = measure_named(model, [ids, ids], 64, [0.5])
    by_name = {name: rest for name, share, *rest in rows}
    assert list(by_name) == ["everything", *NAMED]
    token = 4 * 2 * 2 * model.head_dim  # bytes of a token in two heads of two layers
    everything = by_name["everything"][0]
    for name in NAMED:
        kept, loss, milliseconds = by_name[name]
        assert everything - kept == 32 * token, name
        assert abs(loss) < 5
        assert milliseconds > 0
    (made,) = table(rows, "python")["tables"]
    assert [row[0] for row in made["rows"]] == list(by_name)


@pytest.mark.archs("cpu")
def test_each_way_of_choosing_reads_its_tokens(model, arch):
    """All tokens chosen lose nothing; fewer are read for fewer bytes, those of a window as many as it has."""
    from choose import WAYS, measure

    ids = encode(model, PROMPTS[-1])[:72]
    rows = {(name, count): rest for name, count, *rest in measure(model, [ids], 64, [96, 32])}
    assert list(rows) == [("everything", 0), *((way, count) for way in WAYS for count in (96, 32))]
    everything, row = rows["everything", 0][0], 2 * model.num_kv_heads * model.head_dim * 2 / 1024
    whole = sum(window is None for window in model.windows)
    for way in WAYS:
        assert abs(rows[way, 96][1]) < 2e-3, way
        assert rows[way, 32][0] < rows[way, 96][0]
        assert abs(rows[way, 32][1]) < 5
    lengths = np.arange(65, 73)
    assert everything - rows["window and sinks", 32][0] == pytest.approx(whole * row * (lengths - 32).mean())


@pytest.mark.archs("cpu")
def test_each_format_has_its_bytes_and_loses_little(model, arch):
    from formats import PLAIN, measure

    rows = {name: rest for name, *rest in measure(model, [encode(model, PROMPTS[-1])[:24]], ["q8_0"], 256)}
    assert list(rows) == [PLAIN, "q8_0"]
    numbers = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    assert rows[PLAIN][0] == 4 * numbers
    assert rows["q8_0"][0] == numbers * (32 + 2) // 32, "a float16 scale for 32 codes"
    assert rows[PLAIN][1] == 0
    assert abs(rows["q8_0"][1]) < 0.1
    assert min(rate for _, _, *rates in rows.values() for rate in rates) > 0


def test_saving_is_all_or_nothing(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("rich")
    import train

    config = json.loads((EXAMPLES / "model/config.json").read_text()) | {"hidden_size": 32, "intermediate_size": 16}
    network = train.TorchModel(config)
    train.save(network, config, {"steps": 1}, tmp_path)
    small = Model.load(tmp_path)
    assert recomputed_logits(small, [0, 5, 9]).shape == (3, config["vocab_size"])

    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(TypeError):
        train.save(network, config, {"steps": object()}, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_training_on_a_folder_keeps_the_best_weights(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("rich")
    library, out = tmp_path / "library", tmp_path / "out"
    for name in [f"{i}.py" for i in range(40)] + ["test/a.py", "encodings/b.py"]:
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(f"def f{name[0]}(x):\n    return x + {name[0]!r}\n" * 9)
    few = run("--library", str(library / "test"), script="train.py")
    assert few.returncode == 1
    assert "1 Python sources there, which are too few" in few.stderr
    sizes = ("--batch", "1", "--context", "16", "--vocabulary", "110", "--dropout", "0.1", "--out", str(out))
    done = run(
        "--library", str(library), "--tests", "0.5", "--steps", "4", "--save-every", "2", *sizes, script="train.py"
    )
    assert done.returncode == 0, done.stderr
    assert "40 files" in done.stdout
    training = json.loads((out / "training.json").read_text())
    assert (training["files"], training["files_held_out"], training["corpus"]) == (40, 2, "library")
    losses = [float(loss) for loss in re.findall(r"validation loss ([\d.]+)", done.stdout)]
    assert len(losses) == 2
    assert training["validation_loss_nats_per_token"] == min(losses)
    assert Model.load(out).parameters == training["parameters"]


def test_the_vocabulary_reads_any_text(model):
    text = Tokenizer.clean("def f(x):\n\treturn 'naïve' # 5 €\r\n")
    assert text == f"def f(x):\n    return 'na{OTHER}ve' # 5 {OTHER}{OTHER}\n"
    assert model.tokenizer.decode(model.tokenizer.encode(text)) == text
    assert Tokenizer(["a", "b", "ab", "abc"]).encode("abcabab") == [3, 2, 2]
    assert model.tokenizer.decode(model.tokenizer.encode(FILE_START + "x")) == "\n\nx"


def test_the_shipped_model_is_small_and_says_how_it_was_made():
    folder = EXAMPLES / "model"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 4 << 20
    training = json.loads((folder / "training.json").read_text())
    assert training["command"].startswith("python examples/train.py")
    assert training["validation_loss_nats_per_token"] < 2.0
    assert training["parameters"] == Model.load(folder).parameters


@pytest.mark.archs("cpu")
@pytest.mark.filterwarnings("default")
def test_rollouts_compares_texts_and_time(arch, monkeypatch, capsys):
    pytest.importorskip("transformers")
    from tikv.integrations.transformers.batching import managers as batching
    from tikv.integrations.transformers.versions.installed import VERSION

    if VERSION < batching.FIRST:
        pytest.skip("this version's continuous batching is refused")
    example = importlib.import_module("rollouts")
    command = ["--prompts", "3", "--longest", "9", "--tokens", "3", "--sample"]
    monkeypatch.setattr(sys, "argv", ["rollouts.py", *command])
    example.main()
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert title == "3 prompts of up to 9 tokens, 3 new tokens each, torch.float32"
    assert head.split() == ["attention", "first", "call", "later", "tokens/s", "as", "generate"]
    assert [row.split()[0] for row in rows] == ["sdpa", "tikv", "tikv_int8", "sdpa,", "tikv,", "tikv_int8,"]
    assert [row.split()[-3:] for row in rows[:2]] == [["3", "of", "3"]] * 2
