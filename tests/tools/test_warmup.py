"""tikv.warmup: what follows compiles nothing, and a store, a pool or a cache is as it was."""

import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import oracle
import pytest

import tikv
from tikv import runtime
from tikv.runtime.cache import BoundedCache
from tikv.tools import warmup as warmups

pytestmark = pytest.mark.thorough

FORM = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 32}
STORES = {
    "windows": {"dtype": "float32", "window": [None, 24, None]},
    "half": {"dtype": "float16"},
    "codes": {"dtype": "int8", "window": [24, None, 24], "sinks": 2},
    "groups along tokens": {"dtype": tikv.Quant(4, 32, axis="tokens", residual=32)},
}


@pytest.fixture
def made(arch, monkeypatch):
    """The kernels that are made from here on, as in a process that has made none."""
    live = runtime.current()
    monkeypatch.setattr(live, "kernels", BoundedCache())
    return live.kernels


def rows(rng, arch, *shape):
    return oracle.place(rng.standard_normal(shape).astype(np.float32), arch)


def generate(store, rng, arch, prompt, steps):
    """A prompt and tokens, in each layer; all results."""
    found = []
    for n in (prompt, *[1] * steps):
        for layer in range(store.num_layers):
            given = rows(rng, arch, n, 4, 32), rows(rng, arch, n, 2, 32), rows(rng, arch, n, 2, 32)
            found.append(oracle.to_numpy(store.extend(layer, *given)))
    return found


@pytest.mark.full("vulkan", unless=lambda params: params["case"] == "half")
@pytest.mark.parametrize("case", STORES)
def test_a_store_compiles_nothing_afterwards(arch, made, case):
    store, other = (tikv.KVCacheStore(**FORM, capacity=160, **STORES[case]) for _ in range(2))
    names = tikv.warmup(store, query_heads=4, tokens=(20, 1), formats="float32", quiet=True)
    assert sorted(names) == sorted(kernel.title for kernel in made.values())
    assert all(re.fullmatch(r"[a-z ]+", name) for name in names)
    assert len(names) > 1
    assert (store.length, [store.held(i) for i in range(3)]) == (0, [0, 0, 0])
    before = set(made)
    got = generate(store, np.random.default_rng(1), arch, 20, 140)
    assert [made[key].name for key in set(made) - before] == []
    for a, b in zip(got, generate(other, np.random.default_rng(1), arch, 20, 140), strict=True):
        oracle.assert_same_bits(a, b)
    store.reset()
    assert tikv.warmup(store, query_heads=4, tokens=[1, 20], formats=["float32"], quiet=True) == []


def test_a_captured_step_compiles_nothing_afterwards(arch, rng, made):
    store = tikv.KVCacheStore(**FORM, capacity=32, dtype="float32")
    tikv.warmup(store, query_heads=4, steps=True, quiet=True)
    before = set(made)
    step = tikv.compile_step(store, layers=0)
    for _ in range(3):
        step.run(rows(rng, arch, 1, 2, 32), rows(rng, arch, 1, 2, 32), rows(rng, arch, 1, 4, 32))
    assert [made[key].name for key in set(made) - before] == []


@pytest.mark.full("vulkan")
@pytest.mark.parametrize("per_head", [False, True])
def test_a_pool_compiles_nothing_afterwards(arch, rng, made, per_head):
    pool = tikv.PagedKVCacheStore(**FORM, num_blocks=48, block_size=16, dtype="float32", per_head=per_head)
    assert len(tikv.warmup(pool, query_heads=4, tokens=(20, 1), quiet=True)) > 1
    assert (len(pool), pool.num_free_blocks) == (0, 48)
    before = set(made)
    seqs = [pool.add() for _ in range(3)]
    for n in (20, *[1] * 80):
        for layer in range(3):
            given = rows(rng, arch, 3 * n, 4, 32), rows(rng, arch, 3 * n, 2, 32), rows(rng, arch, 3 * n, 2, 32)
            pool.extend(layer, *given, seqs, [0, n, 2 * n, 3 * n])
    assert [made[key].name for key in set(made) - before] == []


@pytest.mark.archs("cpu")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("options", [{}, {"dtype": "int8"}, {"max_cache_len": 120}, {"window": 24, "sinks": 2}])
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_a_model_compiles_nothing_afterwards(arch, made, family, options):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from model_cache import BASE, given

    from tikv.integrations.transformers import TikvCache

    slides = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"] * 2}
    more = {"query_pre_attn_scalar": 8, **slides} if family == "Gemma3" else {}
    config = getattr(transformers, family + ("TextConfig" if more else "Config"))(**BASE, **more)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.set_attn_implementation("tikv")
    cache = TikvCache(model.config, **options)
    assert tikv.warmup(cache, tokens=(30, 1), quiet=True)
    assert (cache.get_seq_length(), cache.nbytes) == (0, 0)
    before = set(made)
    model.generate(torch.randint(2, 97, (1, 30)), **given(cache), max_new_tokens=60, do_sample=False)
    assert [made[key].name for key in set(made) - before] == []
    with pytest.raises(tikv.OptionError, match="holds 89 tokens"):
        tikv.warmup(cache)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("options", [{"max_cache_len": 120}, {"window": 24, "sinks": 2}])
def test_steps_of_a_model_compile_nothing_afterwards(arch, made, options):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from model_cache import BASE, given

    from tikv.integrations.transformers import TikvCache, captured

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**BASE)).eval()
    model.set_attn_implementation("tikv")
    tikv.warmup(TikvCache(model.config, **options), tokens=(30, 1), steps=True, quiet=True)
    before, cache = set(made), TikvCache(model.config, **options)
    model.generate(torch.ones((1, 30)).long(), **given(cache), max_new_tokens=60, custom_generate=captured)
    assert [made[key].name for key in set(made) - before] == []


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"query_heads": None}, tikv.OptionError, "query_heads is missing"),
        ({"query_heads": 3}, tikv.ShapeError, "query_heads=3 cannot be divided evenly among 2 KV heads"),
        ({"query_heads": 0}, tikv.PositionError, "query_heads=0"),
        ({"tokens": ()}, tikv.OptionError, r"tokens=\(\)"),
        ({"tokens": (1, 0)}, tikv.PositionError, "tokens=0"),
        ({"tokens": (1, 200)}, tikv.CapacityError, "tokens=200 do not fit"),
        ({"formats": "int8"}, tikv.OptionError, "unknown formats 'int8'"),
        ({"formats": ("float32", "nothing")}, tikv.DTypeError, "nothing"),
    ],
)
@pytest.mark.archs("cpu")
def test_what_is_wrong_is_said(arch, change, error, says):
    store = tikv.KVCacheStore(**FORM, capacity=160, dtype="float32")
    pool = tikv.PagedKVCacheStore(**FORM, num_blocks=8, block_size=16, dtype="float32")
    for target in (store, pool):
        with pytest.raises(error, match=rf"^warmup: .*{says}"):
            tikv.warmup(target, **{"query_heads": 4, "quiet": True, **change})
    assert (store.length, len(pool)) == (0, 0)


@pytest.mark.archs("cpu")
def test_what_holds_tokens_or_is_something_else_is_refused(arch, rng):
    store = tikv.KVCacheStore(**FORM, capacity=160, dtype="float32")
    k = rng.standard_normal((5, 2, 32)).astype(np.float32)
    store.append(1, k, k)
    with pytest.raises(tikv.OptionError, match="the KVCacheStore holds 5 tokens"):
        tikv.warmup(store, query_heads=4)
    oracle.assert_same_bits(store.tokens(1)[0].numpy()[0], k.swapaxes(0, 1))
    pool = tikv.PagedKVCacheStore(**FORM, num_blocks=8)
    pool.add()
    with pytest.raises(tikv.OptionError, match="the PagedKVCacheStore holds 1 sequences"):
        tikv.warmup(pool, query_heads=4)
    with pytest.raises(tikv.OptionError, match="list cannot be warmed up"):
        tikv.warmup([store], query_heads=4)
    with pytest.raises(tikv.OptionError, match="2 objects were given"):
        tikv.warmup(store, pool, query_heads=4)


@pytest.mark.archs("cpu")
def test_a_bar_shows_each_kernel_unless_quiet(arch, made, monkeypatch):
    """On a terminal, as `progress` would show it."""
    import contextlib

    seen = []

    @contextlib.contextmanager
    def progress(title, total):
        yield lambda now, done: seen.append((title, total, now, done))

    monkeypatch.setattr(warmups, "is_shown", lambda: True)
    monkeypatch.setattr(warmups, "progress", progress)
    store = tikv.KVCacheStore(**FORM, capacity=32, dtype="float32")
    names = tikv.warmup(store, query_heads=4, processes=1)
    total = seen[0][1]
    assert {(title, n) for title, n, _, _ in seen} == {("warmup", total)}
    assert [done for *_, done in seen] == sorted(done for *_, done in seen)
    assert seen[0][2] == "float32, 1 new token after 0"
    kernels = [now for _, _, now, _ in seen if re.fullmatch(r"float32, 1 new token after \d+: [a-z ]+", now)]
    assert len(kernels) == len(names)
    seen.clear()
    tikv.warmup(store, query_heads=4, quiet=True)
    assert seen == []


BESIDE = """
import json, sys, numpy as np, tikv
from tikv.tools.warmup import beside
live = tikv.init(sys.argv[1])
store = tikv.KVCacheStore(num_layers=2, num_kv_heads=2, head_dim=32, capacity=64, dtype="float16", window=[None, 24])
{before}
names = tikv.warmup(store, query_heads=4, tokens=(20, 1), processes=2, quiet=True)
compiled = sum(kernel.seconds_compiled for kernel in live.kernels.values())
rows = np.random.default_rng(0).standard_normal((2, 20, 4, 32)).astype(np.float16)
outs = [store.extend(layer, rows[layer], rows[0][:, :2], rows[1][:, :2]).astype(np.float32) for layer in range(2)]
print(json.dumps([len(names), compiled, np.stack(outs).tolist()]))
"""


def beside_in(folder, arch, before=""):
    """(kernels, seconds of their compilation, results, stderr) of a process with its cache of kernels in a folder."""
    child = subprocess.run(
        [sys.executable, "-c", BESIDE.replace("{before}", before), arch],
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
        env={**os.environ, "TI_OFFLINE_CACHE_FILE_PATH": str(folder), "QD_OFFLINE_CACHE_FILE_PATH": str(folder)},
    )
    return *json.loads(child.stdout.splitlines()[-1]), child.stderr


@pytest.mark.archs("cpu")
def test_processes_compile_side_by_side(arch, tmp_path):
    """This one then loads what they made; a later one starts none. The results are those of a single process."""
    count, seconds, results, said = beside_in(tmp_path, arch)
    marks = list(pathlib.Path(tmp_path).rglob("tikv-warmed-*"))
    assert (len(marks), said) == (1, "")
    again = beside_in(tmp_path, arch, "beside.subprocess = None  # which would raise")
    assert (again[0], again[2], again[3]) == (count, results, "")
    # Here they fail, which is said once, and the same kernels are compiled in this process.
    alone = beside_in(tmp_path / "other", arch, "sys.executable = '/bin/false'")
    assert (alone[0], alone[2]) == (count, results)
    assert alone[3].count("a process that compiles failed") == 1
    assert 3 * seconds < alone[1]


@pytest.mark.archs("cpu")
def test_processes_end_with_an_interrupt(arch, tmp_path):
    interrupted = """
def stop(title, done): raise KeyboardInterrupt
children = []
popen = beside.subprocess.Popen
beside.subprocess.Popen = lambda *a, **k: children.append(popen(*a, **k)) or children[-1]
from tikv.tools.warmup import stores, asked
jobs = stores.jobs_of_store(store, asked.Asked.checked(4, 1, None, False))
kernels = beside.kernels_of([job.run for job in jobs], live)
try:
    beside.compile_beside(kernels, live, 2, stop)
except KeyboardInterrupt:
    assert len(children) == 2 and all(child.poll() is not None for child in children)
else:
    raise AssertionError
store.reset()
"""
    count, _, results, _ = beside_in(tmp_path, arch, interrupted)
    assert count > 1
    assert np.isfinite(results).all()


BEHIND = """
from tikv.launch import notices, pending
notices.SECONDS = 300.0  # the wait for the processes may be long enough to be announced
children, popen = [], beside.subprocess.Popen
beside.subprocess.Popen = lambda *a, **k: children.append(popen(*a, **k)) or children[-1]
assert tikv.warmup(store, query_heads=4, tokens=(20, 1), processes=2, wait=False) == []
assert (store.length, live.has_compiled, len(pending._running)) == (0, False, 1)
"""


FORKED = """
import os, warnings
warnings.simplefilter("ignore")  # of threads at a fork
if not (forked := os.fork()):
    os._exit(pending.wait_for(pending.ENGINE))
assert os.waitpid(forked, 0)[1] == 0
""" * hasattr(os, "fork")


@pytest.mark.archs("cpu")
def test_processes_compile_while_the_caller_goes_on(arch, tmp_path):
    """The next compilation waits for them, and then loads what they made; results are those of a single process."""
    waits = BEHIND + FORKED + "np.testing.assert_equal(store.extend(0, *[np.zeros((1, 2, 32), np.float16)] * 3), 0)\n"
    waits += "assert all(child.poll() == 0 for child in children) and len(children) == 2\nstore.reset()"
    _, seconds, results, said = beside_in(tmp_path, arch, waits)
    assert said == ""
    alone = beside_in(tmp_path / "other", arch, "sys.executable = ''")
    assert alone[2] == results
    assert 3 * seconds < alone[1]


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("end", ["sys.exit()", "raise KeyboardInterrupt"])
def test_processes_end_with_the_interpreter(arch, tmp_path, end):
    told = "while len(children) < 2: pass\nprint(*[child.pid for child in children], flush=True)\n"
    script = BESIDE.partition("{before}")[0] + BEHIND + told + end
    child = subprocess.run(
        [sys.executable, "-c", script, arch],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "TI_OFFLINE_CACHE_FILE_PATH": str(tmp_path), "QD_OFFLINE_CACHE_FILE_PATH": str(tmp_path)},
    )
    assert "warmup" not in child.stderr.replace("tools/warmup", "").replace("tikv.warmup", "")
    numbers = child.stdout.split()
    assert len(numbers) == 2, child.stderr
    for number in numbers:
        with pytest.raises(ProcessLookupError):
            os.kill(int(number), 0)
    assert not list(tmp_path.rglob("tikv-warmed-*"))
