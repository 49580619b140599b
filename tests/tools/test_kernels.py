"""`tikv kernels`: built over a stand-in for NVIDIA's driver, whose launches do nothing, and used without a compiler."""

import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time
import zipfile

import pytest

import tikv
from tikv import engines, runtime
from tikv.__main__ import main
from tikv.launch.cuda import keys, made
from tikv.tools.kernels import building, forms, stand_in
from tikv.tools.kernels.collect import Collected

ROOT = pathlib.Path(__file__).parent.parent.parent
FORM = "store-float16-same-d64-g1-token"

on_linux = pytest.mark.skipif(
    sys.platform != "linux" or runtime.version_of("cuda-bindings") is None or engines.TAICHI.version() is None,
    reason="building kernels needs Linux, Taichi and cuda-bindings: pip install 'taichi-kv[cuda]'",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the kernel of one form that copies rows, made here; and all kernels that the form needs."""
    folder, work = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("work")
    stand_in.build_driver(work)
    environment, chosen = stand_in.environment_of(work, (9, 0)), forms.chosen([FORM])
    collected = building.collect(work / "kernels.pickle", chosen, environment)
    copies = [kernel for kernel in collected.kernels if kernel.name.startswith("copy(")][:1]
    result = building.write_file(folder, (9, 0), chosen, Collected(copies, {}), 2, environment)
    assert (result.left_out, collected.refused) == ({}, {})
    return folder, collected.kernels


@pytest.fixture
def run(tmp_path):
    """Run Python over the stand-in, as on a GPU of compute capability 9.0 whose user has compiled nothing yet."""
    stand_in.build_driver(tmp_path)
    environment = {**os.environ, **stand_in.environment_of(tmp_path, (9, 0)), "PYTHONPATH": str(ROOT)}

    def run(script, folder, **changed):
        command = [sys.executable, "-c", script]
        environment.update({made.VARIABLE: str(folder), "TIKV_LAUNCHER": "native"}, **changed)
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)

    return run


@on_linux
def test_a_file_holds_ptx_and_says_what_it_is(built):
    folder, needed = built
    assert [path.name for path in folder.iterdir()] == ["sm_90.zip"]
    file = made.contents(folder / "sm_90.zip")
    copy = next(kernel for kernel in needed if kernel.name.startswith("copy("))
    assert (file.refusal, file.capability, file.kernels) == ("", (9, 0), {copy.key})
    assert file.manifest["tikv"] == tikv.__version__
    assert file.manifest["engine"].startswith("taichi 1.7")
    assert file.manifest["forms"] == [FORM]
    assert file.manifest["sources"] == keys.sources()
    text = made.read(copy.key, "sm_90")
    assert text is None, "it is not in a folder where tikv looks"
    with zipfile.ZipFile(folder / "sm_90.zip") as archive:
        assert ".visible .entry copy" in archive.read(f"{copy.key}.ptx").decode()


@on_linux
def test_a_form_needs_kernels_of_copies_attention_and_merges(built):
    _, needed = built
    assert {kernel.name.partition("(")[0] for kernel in needed} == {"copy", "attend_tensor", "merge"}
    assert len({kernel.key for kernel in needed}) == len(needed)
    assert pickle.loads(pickle.dumps(needed)) == needed


APPEND = """
import numpy as np, os, tikv
from tikv.launch import launcher
from tikv.launch.cuda import compiler, disk_cache
compiler._compile = None  # an error, if it is called
live = tikv.init("cuda")
store = tikv.KVCacheStore(num_layers=1, num_kv_heads=8, head_dim=64, capacity=4096, dtype="float16")
k = tikv.CacheArray(tikv.arrays.new_array((1, 8, 64), tikv.dtypes.float16, live, zeroed=True), live)
store.append(0, k, k)
assert launcher.launcher_of(live)[0] == "native"
assert launcher.fallbacks == {}
(kernel,) = live.kernels.values()
assert kernel.native is not None
assert not disk_cache.folder().exists()
print("bound")
"""


@on_linux
def test_a_kernel_made_beforehand_is_bound_without_a_compiler(built, run):
    child = run(APPEND, built[0])
    assert (child.returncode, child.stdout) == (0, "bound\n"), child.stderr


@on_linux
def test_without_the_file_it_would_have_been_compiled(run, tmp_path):
    child = run(APPEND, tmp_path)
    assert child.returncode == 1
    assert "'NoneType' object is not callable" in child.stderr


@on_linux
def test_a_build_runs_taichi_whatever_the_environment_names(monkeypatch, tmp_path):
    monkeypatch.setenv("TIKV_ENGINE", "quadrants")
    assert stand_in.environment_of(tmp_path, (9, 0))["TIKV_ENGINE"] == "taichi"


on_both = pytest.mark.skipif(
    engines.QUADRANTS.version() is None, reason="Quadrants is not installed: pip install 'taichi-kv[quadrants]'"
)

LAUNCHES = """
import hashlib, json, os, sys
if os.environ["TIKV_ENGINE"] == "quadrants":
    sys.modules["taichi"] = None  # as on Python 3.14, which has no Taichi
import tikv
from tikv.launch import launcher
from tikv.launch.cuda import compiler, driver, native
compiler._compile = None  # an error, if it is called
loaded, launched, places = [], [], {}
load, launch = driver.Device.load, native.NativeBound.launch

def loading(self, ptx, entry, shared_bytes=0):
    loaded.append((hashlib.sha256(ptx.encode()).hexdigest(), entry, shared_bytes))
    return load(self, ptx, entry, shared_bytes)

def launching(self):
    # Addresses, which differ from process to process, by the order in which they are first seen.
    at = [offset // 8 + 1 for offset, word in zip(self._at, self.kernel.words) if word]
    addresses = [places.setdefault(self._pointers[i], len(places)) for i in at]
    numbers = [n for i, n in enumerate(self._entries) if i // 2 not in at]
    config = self._config
    grid = config.gridDimX, config.blockDimX, config.sharedMemBytes, config.numAttrs, int(config.hStream)
    launched.append((self.kernel.name, grid, addresses, numbers))
    return launch(self)

driver.Device.load, native.NativeBound.launch = loading, launching
live = tikv.init("cuda")

def zeros(*shape):
    return tikv.CacheArray(tikv.arrays.new_array(shape, tikv.dtypes.float16, live, zeroed=True), live)

def decode(width, batch=1, prompt=0):
    form = dict(num_layers=1, num_kv_heads=8, head_dim=width, dtype="float16")
    store = tikv.KVCacheStore(**form, capacity=16384 // batch, batch_size=batch)
    for tokens in [prompt, 1, 1, 1] if prompt else [1, 1, 1]:
        rows = zeros(batch, tokens, 8, width)
        store.extend(0, rows, rows, rows)
    return store
"""

SAME = """
for batch, prompt in ((1, 512), (4, 0)):
    decode(64, batch, prompt)
assert launcher.fallbacks == {}, launcher.fallbacks
assert [kernel.name for kernel in live.kernels.values() if kernel.compiled is not None] == []
print(json.dumps([live.engine.name, tikv.info()["launcher"]["launcher"], loaded, launched]))
"""


@on_both
@on_linux
@pytest.mark.thorough
def test_both_engines_make_the_same_launches_of_what_was_made_beforehand(run, tmp_path):
    """Of the same PTX, with the same grids and arguments; with Quadrants where there is no Taichi."""
    environment, folder = stand_in.environment_of(tmp_path, (9, 0)), tmp_path / "made"
    folder.mkdir()
    chosen = forms.chosen([FORM, FORM.replace("token", "prompt")])
    collected = building.collect(tmp_path / "kernels.pickle", chosen, environment)
    assert building.write_file(folder, (9, 0), chosen, collected, 2, environment).left_out == {}
    said = {}
    for engine in ("taichi", "quadrants"):
        child = run(LAUNCHES + SAME, folder, TIKV_ENGINE=engine)
        assert child.returncode == 0, child.stderr
        used, launcher, *said[engine] = json.loads(child.stdout)
        assert (used, launcher) == (engine, "native")
    assert said["quadrants"] == said["taichi"]
    loaded, launched = said["quadrants"]
    assert len(loaded) > 5
    assert {name.partition("(")[0] for name, *_ in launched} == {"copy", "attend_tensor", "attend_hopper", "merge"}


OTHERS = """
store = decode(64)
names = lambda which: sorted(k.name.partition("(")[0] for k in live.kernels.values() if which(k))
assert names(lambda kernel: kernel.native) == ["copy"]
assert names(lambda kernel: kernel.compiled) == ["attend_lanes"]
assert len(launched) == 3, "copies; the engine launches attention"
assert [name.partition("(")[0] for name in launcher.fallbacks] == ["attend_lanes"]
why = "no file of kernels made beforehand has it, and the native launcher cannot load what Quadrants compiles"
assert set(launcher.fallbacks.values()) == {why}
assert tikv.info()["tensor_cores"] == "in use, if a kernel was made beforehand"
assert tikv.info()["launcher"]["launcher"] == "native"

graph = tikv.GraphBuilder()
graph.decode_attention("q", "k", "v", "length", out="out")
step = graph.compile()
step.run({"q": zeros(1, 8, 64), "k": store.keys(0), "v": store.values(0), "length": 3})
assert names(lambda kernel: kernel.native) == ["copy"]
assert len(launched) == 3
tikv.warmup(tikv.KVCacheStore(num_layers=1, num_kv_heads=8, head_dim=64, capacity=64, dtype="float16"),
            query_heads=8, formats="float16", processes=2, quiet=True)

tikv.runtime.ti.reset()
tikv.init("cuda", invariant=True)
live = tikv.runtime.current()
report = tikv.info()["launcher"]
assert report["launcher"] == "direct" and "may give other bits" in report["why"], report
launched.clear()
decode(64)
assert launched == []
print("others")
"""


@on_both
@on_linux
def test_what_no_file_has_is_compiled_and_launched_by_quadrants(built, run):
    """In graphs too, whose launches are recorded before any is bound; and all of it under `invariant`."""
    child = run(LAUNCHES + OTHERS, built[0], TIKV_ENGINE="quadrants", TIKV_LAUNCHER="")
    assert (child.returncode, child.stdout) == (0, "others\n"), child.stderr
    assert "keeps Quadrants's own launcher" not in child.stderr


@on_linux
def test_the_list_says_what_is_there_and_whether_it_is_used(built, capsys, monkeypatch, tmp_path):
    folder, _ = built
    assert main(["kernels", "list", str(folder), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["capability"], row["kernels"], row["refusal"], row["forms"]) == ("9.0", 1, "", [FORM])
    assert main(["kernels", "list", str(folder)]) == 0
    assert "used by this version" in capsys.readouterr().out
    monkeypatch.setenv(made.VARIABLE, str(folder))
    assert "sm_90.zip: 1 kernels" in tikv.info()["made_kernels"]
    assert main(["kernels", "list"]) == 0
    capsys.readouterr()
    monkeypatch.setenv(made.VARIABLE, str(tmp_path))
    (tmp_path / "sm_80.zip").write_bytes(made.packed((8, 0), {}, {"tikv": "0.0", "sources": "a digest of others"}))
    assert main(["kernels", "list"]) == 1
    assert "from other sources of kernels" in " ".join(capsys.readouterr().out.split())
    assert "not used" in tikv.info()["made_kernels"]
    assert main(["kernels", "list", str(tmp_path / "nothing")]) == 1
    assert "no kernels made beforehand in" in capsys.readouterr().out
    monkeypatch.setenv(made.VARIABLE, "")
    assert main(["kernels", "list"]) == 0
    assert tikv.info()["made_kernels"].startswith("not found")


@on_linux
def test_a_stopped_build_leaves_nothing(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    # Where the tests run in a shell's background, Ctrl-C is ignored, and children inherit that.
    script = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from tikv.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", script, "kernels", "build", str(tmp_path / "made"), "--only", FORM]
    child = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(work)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for _ in range(1200):  # until the kernels are known, and some are being compiled
        if list(work.glob("tikv-build-*/kernels.pickle")) or child.poll() is not None:
            break
        time.sleep(0.1)
    time.sleep(1)
    os.killpg(child.pid, signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert (child.returncode, errors) == (130, "tikv: stopped\n")
    assert list((tmp_path / "made").iterdir()) == []
    assert list(work.iterdir()) == []


@on_linux
@pytest.mark.parametrize(("command", "text"), [("no-such-cc", "no C compiler"), ("false", "cannot compile driver.c")])
def test_a_machine_without_a_c_compiler_is_told_so(command, text, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CC", command)
    assert main(["kernels", "build", str(tmp_path / "made"), "--only", FORM]) == 1
    error = capsys.readouterr().err
    assert text in error
    assert "Debian: gcc libc6-dev" in error


def test_what_a_build_needs_is_named():
    script = """
import sys
from tikv import engines, runtime
from tikv.errors import ArchError
from tikv.tools.kernels import stand_in
for sys.platform, missing in (("darwin", ""), ("linux", "taichi"), ("linux", "cuda-bindings")):
    engines.version_of = runtime.version_of = lambda name: None if name == missing else "1"
    try:
        stand_in.require_tools()
    except ArchError as error:
        print(error)
"""
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    elsewhere, engine, binding = child.stdout.splitlines()
    assert "runs on Linux only, and here is darwin. Build on a machine that has it" in elsewhere
    assert "Taichi, which writes the kernels' PTX, is not installed" in engine
    assert "cuda-bindings is not installed. Install taichi-kv[cuda]" in binding


@pytest.mark.parametrize(
    "arguments", [("--only", "abacus"), ("--capability", "9"), ("--capability", "2.0"), ("--capability", "nine.0")]
)
def test_arguments_without_a_meaning_are_refused(arguments, tmp_path, capsys):
    assert main(["kernels", "build", str(tmp_path / "made"), *arguments]) == 1
    assert "kernels build: --" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_patterns_choose_forms():
    assert [form.name for form in forms.chosen([FORM])] == [FORM]
    every = forms.chosen(["store-*", "pool-*", "cache-*", FORM])
    assert len(every) == len(forms.FORMS) == len({form.name for form in every})
    assert forms.chosen() == list(forms.FORMS)


@pytest.mark.parametrize("arguments", [("kernels",), ("kernels", "abacus"), ("kernels", "build")])
def test_an_action_is_named(arguments):
    child = subprocess.run([sys.executable, "-m", "tikv", *arguments], capture_output=True, text=True, check=False)
    assert child.returncode == 2
    assert "usage: tikv kernels" in child.stderr


@pytest.mark.parametrize("action", ["build", "list"])
def test_an_action_explains_itself(action, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["kernels", action, "--help"])
    assert f"usage: tikv kernels {action}" in capsys.readouterr().out


CACHE = """
import torch, transformers, tikv
from tikv.arrays import dlpack, readers
from tikv.integrations.transformers.layers import layer
from tikv.integrations.transformers.memory import storage
from tikv.tools.kernels import collect, forms
from tikv.tools.kernels.collect import collected

# The stand-in's memory is the host's: torch's CPU sees it, and says that it is a GPU's.
torch.Tensor.is_cuda, torch.Tensor.is_cpu = property(lambda self: True), property(lambda self: False)
dlpack.device_of = lambda array: (dlpack._CPU, 0)
readers._torch_device_name = lambda *_: "cuda:0"
zeros = torch.zeros
torch.zeros = lambda *shape, device=None, **options: zeros(*shape, **options)
storage.share_memory_with = layer.share_memory_with = lambda device: torch.no_grad()

from tikv.integrations.transformers import TikvCache
from tikv.integrations.transformers.memory import steps
BASE = dict(hidden_size=32, vocab_size=32, intermediate_size=16, num_hidden_layers=2)
config = transformers.LlamaConfig(**BASE, num_attention_heads=32, num_key_value_heads=8, head_dim=64, dtype="float16")
config.pad_token_id = None
model = transformers.LlamaForCausalLM(config).eval().to(torch.float16)
model.set_attn_implementation("tikv")

def generate(stored, batch, lengths=(300, 1, 1, 200, 4, 1, 30, 1, 400, 1), **options):
    cache = TikvCache(model.config, dtype=None if stored == "same" else stored, **options)
    def read(tokens):
        ids = torch.ones((batch, tokens), dtype=torch.int64)
        with torch.no_grad():
            model(ids, past_key_values=cache)
    for tokens in lengths:
        read(tokens)
    if "max_cache_len" in options:
        for each in cache.layers:
            each.make_ready()
        with steps.on_device(cache):
            read(1)
"""

FORMS = """
class Generated:
    def __init__(self, stored):
        self.name, self.stored = stored, stored
    def call(self):
        for batch in (1, 3):
            generate(self.stored, batch)
            generate(self.stored, batch, max_cache_len=2000)

tikv.init("cuda")
live, stored = tikv.runtime.current(), {stored}
collect.FORMS = (*forms.FORMS, Generated(stored))
mine = [form.name for form in forms.chosen([f"*-float16-{stored}-d64-g4-*"])]
made = {kernel.key for kernel in collected(mine, print).kernels}
live.kernels = type(live.kernels)()
found = collected([stored], print)
assert found.refused == {}, found.refused
assert len(found.kernels) > 8
print("missing:", [kernel.name for kernel in found.kernels if kernel.key not in made])
"""


@on_linux
@pytest.mark.thorough
@pytest.mark.parametrize(("capability", "stored"), [pytest.param("80", "same", marks=pytest.mark.full), ("90", "int8")])
def test_forms_have_all_that_a_models_cache_needs(run, tmp_path, capability, stored):
    """A Llama generates with a TikvCache, over the stand-in: each kernel that it asks for is that of a form."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    child = run((CACHE + FORMS).replace("{stored}", repr(stored), 1), tmp_path, TIKV_KERNELS_CAPABILITY=capability)
    assert (child.returncode, child.stdout.splitlines()[-1:]) == (0, ["missing: []"]), child.stderr


WARM = """
tikv.init("cuda")
from tikv.launch.cuda import compiler, disk_cache
from tikv.tools.kernels import stand_in
compiler._compile = None  # an error, if it is called
tikv.warmup(TikvCache(model.config, max_cache_len=2000), tokens=(300, 1), processes=2, quiet=True, wait={wait})
generate("same", 1, (300, 1, 1), max_cache_len=2000)
made = len(list(disk_cache.folder().iterdir()))
assert made == len(tikv.runtime.current().kernels)
live = tikv.runtime.current()
live.kernels = type(live.kernels)()
stand_in.SideBySide = None
tikv.warmup(TikvCache(model.config, max_cache_len=2000), tokens=(300, 1), processes=2, quiet=True)
print("warm")
"""


@on_linux
@pytest.mark.thorough
@pytest.mark.parametrize("wait", [pytest.param(True, marks=pytest.mark.full), False])
def test_warmup_compiles_in_processes_what_a_models_cache_needs(run, tmp_path, wait):
    """Over the stand-in, on both sides: nothing is compiled here, and a second time no process is started."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    child = run(CACHE + WARM.replace("{wait}", str(wait)), tmp_path)
    assert (child.returncode, child.stdout) == (0, "warm\n"), child.stderr
    assert "warmup" not in child.stderr


WITHOUT = """
import os, tikv
from tikv.launch.cuda import disk_cache
tikv.init("cuda")
store = tikv.KVCacheStore(num_layers=1, num_kv_heads=8, head_dim=64, capacity=64, dtype="float16")
os.environ["CC"] = "no-such-cc"
names = tikv.warmup(store, query_heads=8, formats="float16", processes=2, quiet=True)
assert 1 < len(names) == len(list(disk_cache.folder().iterdir()))
"""


@on_linux
def test_without_a_c_compiler_warmup_compiles_one_after_the_other(run, tmp_path):
    child = run(WITHOUT, tmp_path)
    assert child.returncode == 0, child.stderr
    assert child.stderr.count("one after the other instead of side by side (ArchError: kernels build: this mach") == 1


ENDS = """
import sys, tikv
tikv.init("cuda")
from tikv.launch.cuda import compiler
children, make = [], compiler.Child.__init__
compiler.Child.__init__ = lambda self, *a: (make(self, *a), children.append(self.process))[0]
store = tikv.KVCacheStore(num_layers=1, num_kv_heads=8, head_dim=64, capacity=64, dtype="float16")
assert tikv.warmup(store, query_heads=8, formats="float16", processes=2, wait=False) == []
while len(children) < 2: pass
print(*[child.pid for child in children], flush=True)
sys.exit()
"""


@on_linux
def test_processes_of_warmup_end_with_the_interpreter(run, tmp_path):
    child = run(ENDS, tmp_path)
    assert (child.returncode, child.stderr) == (0, "")
    assert len(child.stdout.split()) == 2
    for number in child.stdout.split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(number), 0)
    assert not list(tmp_path.glob("tikv-*")), "no temporary folder is left"
