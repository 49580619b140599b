"""Starting the engine, attaching to the caller's, and what is said on the way; each in a process of its own."""

import sys

import oracle
import pytest

import tikv
from tikv import runtime

pytestmark = pytest.mark.thorough

COPY = """
import numpy as np, oracle, tikv
from tikv import reference

def same_bits():
    rng = np.random.default_rng(3)
    for dtype, cache_dtype in ((np.float32, np.float16), (np.float16, np.float16)):
        src = oracle.random_bits(rng, (9, 2, 8), dtype)
        before = oracle.random_bits(rng, (2, 7, 8), cache_dtype)
        cache = oracle.place(before.copy(), ARCH)
        tikv.copy(oracle.place(src, ARCH), cache, position=5, window=7)
        want = reference.copy(src, before, position=5, window=7)
        oracle.assert_same_bits(cache, want, any_nan=dtype != cache_dtype)
"""


OPTIONS = {
    "default_fp=f64": {"default_fp": "ti.f64"},
    "default_ip=i64": {"default_ip": "ti.i64"},
    "debug": {"debug": "True"},
    "slow_math": {"fast_math": "False"},
    "everything": {"default_ip": "ti.i64", "fast_math": "True", "check_out_of_bound": "True"},
}


@pytest.mark.full(unless=lambda case: case["options"] == "everything")
@pytest.mark.parametrize("options", OPTIONS)
def test_it_attaches_to_the_engine_that_runs(arch, python, options):
    """The caller's settings change no bit, and are the caller's again afterwards: also for kernels made later."""
    chosen = OPTIONS[options]
    if arch in ("vulkan", "metal") and "ti.f64" in chosen.values():
        chosen = {"default_fp": "ti.f16"}
    keywords = ", ".join(f"{name}={value}" for name, value in chosen.items())
    child = python(
        f"ARCH = {arch!r}\n"
        + f"import {runtime.engine_in_use().name} as ti\n"
        + f"ti.init(arch=getattr(ti, ARCH), log_level=ti.WARN, enable_fallback=False, {keywords})\n"
        + f"from {runtime.engine_in_use().name}.lang import impl\n"
        + "def settings():\n"
        + "    c, front = impl.get_runtime().prog.config(), impl.get_runtime()\n"
        + "    kinds = front.default_fp, front.default_ip, front.default_up\n"
        + "    return c.fast_math, c.debug, c.check_out_of_bound, *kinds, front.short_circuit_operators\n"
        + "before, program, mine = settings(), impl.get_runtime().prog, ti.ndarray(ti.f32, 4)\n"
        + "mine.fill(3)\n"
        + COPY
        + "same_bits()\n"
        + "assert settings() == before, (before, settings())\n"
        + "assert impl.get_runtime().prog is program and mine.to_numpy().tolist() == [3] * 4\n"
        + "print(tikv.runtime.current().arch, tikv.runtime.current().debug)\n"
    )
    assert child.stdout.split()[-2:] == [arch, str(chosen.get("debug") == "True")]


def test_the_first_operation_starts_it_in_silence(python):
    """On the arch that `init` would choose; nothing on stdout or stderr."""
    child = python("ARCH = 'cpu'\nimport tikv\ntikv.init(arch='cpu')\n" + COPY + "same_bits()\n")
    assert (child.stdout, child.stderr) == ("", "")
    child = python(
        "import numpy as np, tikv\n"
        "import tikv.runtime.devices\ntikv.runtime.devices.candidate_archs = lambda: iter(['cpu'])\n"
        "tikv.copy(np.ones((1, 1, 2), np.float32), np.zeros((1, 2, 2), np.float32), position=0)\n"
        "assert tikv.runtime.current().arch == 'cpu' and tikv.runtime.current().epoch == 1\n"
    )
    assert (child.stdout, child.stderr) == ("", "")


NOTEBOOK = """
import io, sys
real, sys.stdout = sys.stdout, io.StringIO()  # as a notebook does
import tikv
from tikv import runtime
tikv.init(arch="cpu")
assert runtime.engine_in_use().part("lang.shell").pybuf_enabled, "what kernels print would not reach the notebook"
real.write(sys.stdout.getvalue())
"""


def test_a_notebook_shows_nothing_of_the_engine(python):
    child = python(NOTEBOOK)
    assert (child.stdout, child.stderr) == ("", "")


def test_the_start_leaves_the_arithmetic_of_the_thread_alone(arch, python):
    """On x86 the engine makes subnormals zero in all that the thread computes, and the caller's model with it."""
    child = python(
        "import numpy as np, tikv\n"
        "least = np.full(64, 2.0**-126, np.float32)\n"
        f"tikv.init(arch={arch!r})\n"
        "store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=8, capacity=4)\n"
        "store.append(0, *np.ones((2, 1, 1, 1, 8), np.float16))\n"
        "print(np.count_nonzero(least / 2))"
    )
    assert child.stdout.split() == ["64"]


def test_a_second_start_ends_the_first(python):
    child = python(
        "import tikv\n"
        "first = tikv.init(arch='cpu')\n"
        "second = tikv.init(arch='cpu')\n"
        "assert (first.alive, second.alive, first.epoch, second.epoch) == (False, True, 1, 2)\n"
        "assert tikv.runtime.current() is second\n"
        "from tikv.runtime import ti\n"
        "ti.init(arch=ti.cpu, log_level=ti.WARN)\n"
        "third = tikv.runtime.current()\n"
        "assert not second.alive and third.alive and third.epoch == 3\n"
        "assert [r.front.prog is r.program for r in (first, second, third)] == [False, False, True]\n"
        "ti.reset()\n"
        "assert not third.alive and third.front.prog is not third.program\n"
        "try:\n"
        "    tikv.runtime.require_alive(third, 'op')\n"
        "except tikv.StaleRuntimeError as error:\n"
        "    print(error)\n"
        "print(repr(third))\n"
    )
    ended = "a later tikv.init(), ti.init() or ti.reset() ended"
    message = f"op: this object was made in Taichi runtime epoch 3, which {ended}"
    assert oracle.said(message) in child.stdout
    assert "Runtime(cpu, epoch 3, gone)" in child.stdout


def test_a_runtime_that_is_let_go_of_late_frees_nothing_of_the_next(python):
    """An engine frees a program's arrays by address: these are taken again by the next program's."""
    child = python(
        "import gc, numpy as np, tikv\n"
        "from tikv.runtime import ti\n"
        "def arrays():\n"
        "    return [ti.ndarray(ti.f32, (1, 2, 16)) for _ in range(20)]\n"
        "first = tikv.init(arch='cpu'), arrays()\n"
        "tikv.init(arch='cpu')\n"
        "caches = arrays()\n"
        "del first\n"
        "gc.collect()\n"
        "for cache in caches:\n"
        "    tikv.copy(np.ones((1, 1, 16), np.float32), cache, position=1)\n"
        "print(sum(cache.to_numpy().sum() for cache in caches))\n"
    )
    assert child.stdout == "320.0\n"
    assert child.stderr == ""


def test_an_arch_that_is_missing_is_an_error(python):
    """Never another one in its place."""
    missing = "metal" if sys.platform != "darwin" else "cuda"
    child = python(
        f"import tikv\ntry:\n    tikv.init(arch={missing!r})\nexcept tikv.ArchError as error:\n    print(error)\n"
    )
    assert child.stdout.startswith(f"init: {runtime.engine_in_use().title} could not start ({missing}: "), child.stdout
    assert child.stdout.rstrip().endswith("Run `python -m tikv doctor` to see why.")


def test_what_runs_outlives_an_arch_that_is_missing(python):
    missing = "metal" if sys.platform != "darwin" else "cuda"
    child = python(
        "import numpy as np, tikv\n"
        "tikv.init('cpu')\n"
        "store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=4, capacity=8, dtype='float32')\n"
        "try:\n"
        f"    tikv.init({missing!r})\n"
        "except tikv.ArchError:\n"
        "    store.append(0, *np.ones((2, 3, 1, 4), np.float32))\n"
        "print(store.length, tikv.info()['arch'])\n"
    )
    assert child.stdout == "3 cpu\n"


def test_an_arch_or_option_that_is_unknown(python):
    with pytest.raises(
        tikv.ArchError, match=r"init: unknown arch 'opengl'\. Use 'auto' or one of metal, cuda, vulkan, cpu"
    ):
        tikv.init(arch="opengl")
    child = python(
        "import tikv\n"
        "try:\n"
        "    tikv.init(arch='cpu', fast_maths=True)\n"
        "except tikv.OptionError as error:\n"
        "    print(error)\n"
    )
    assert child.stdout.startswith("init: ")
    assert "fast_maths" in child.stdout


def test_auto_goes_on_to_the_next(python):
    """A library that is there and does not work is no reason to fail."""
    missing = "metal" if sys.platform != "darwin" else "cuda"
    child = python(
        "import tikv, tikv.runtime.start\n"
        f"tikv.runtime.start._auto = lambda: ([{missing!r}, 'cpu'], 'best')\n"
        "print(tikv.init().arch, tikv.info()['arch_why'])\n"
        "print(tikv.init('cpu').why_arch)\n"
    )
    first, second = child.stdout.splitlines()
    assert first.startswith(f"cpu {missing}: ")
    assert second == "asked for"


FIRST_IN_A_THREAD = """
import threading
import numpy as np, tikv
tikv.init(arch="cpu")
cache = np.zeros((1, 4, 2), np.float32)
thread = threading.Thread(target=tikv.copy, args=(np.ones((1, 1, 2), np.float32), cache), kwargs={"position": 1})
thread.start()
thread.join()
print(cache[0, :, 0].tolist())
"""


def test_the_first_kernel_may_be_another_threads(python):
    assert python(FIRST_IN_A_THREAD).stdout.strip().endswith("[0.0, 1.0, 0.0, 0.0]")


@pytest.mark.parametrize("option", ["bogus", "default_up", "arch_name"])
def test_an_unknown_option_ends_nothing(arch, option):
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=4, capacity=8)
    with pytest.raises(tikv.OptionError, match=rf"init: .*{option}.*cpu_max_num_threads"):
        tikv.init(arch, **{option: 1})
    assert len(store) == 0
    store.tokens(0)


ENDED = """
import gc, weakref
import numpy as np, tikv
from tikv import runtime

def kernels():
    live = tikv.init(arch=ARCH)
    rows = np.ones((1, 2, 8), np.float32)
    tikv.copy(rows, np.zeros((2, 7, 8), np.float32), position=0)
    assert len(live.kernels) == 1
    return [weakref.ref(kernel.primal) for kernel in live.kernels.values()]

tikv.init(arch=ARCH)
taichis = len(runtime.engine_in_use().settings.kernels)
ended = kernels() + kernels()
tikv.init(arch=ARCH)
gc.collect()
assert [kernel() for kernel in ended] == [None, None]
assert len(runtime.engine_in_use().settings.kernels) == taichis
"""


def test_kernels_end_with_their_runtime(arch, python):
    """Taichi itself would keep them for every one that is started later."""
    python(ENDED.replace("ARCH", repr(arch)))
