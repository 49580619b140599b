"""A process forked after the engine had started: everything that would launch raises at once, and the process ends."""

import os
import time

import pytest

from tikv import runtime

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
]

# `in_child(function)` forks, runs it there and ends by `how`; the exit status must come within seconds.
COMMON = """
import os, signal, sys, time
import numpy as np, oracle, tikv

FORKED = "forked after Taichi had started"

def ended(pid):
    for _ in range(400):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "it hangs"

def in_child(function, how=os._exit):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            function()
        except SystemExit:
            raise
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        how(7)
    found = ended(pid)
    assert found == 7, found

def refused(call):
    start = time.perf_counter()
    try:
        call()
    except tikv.StaleRuntimeError as error:
        assert oracle.said(FORKED) in str(error) and "get_context('spawn')" in str(error), error
        assert ": this process was forked" in str(error), error
    else:
        raise AssertionError("not refused")
    assert time.perf_counter() - start < 2
"""

STARTED = """
ARCH = sys.argv[1]
tikv.init(arch=ARCH)
rows = np.ones((1, 2, 8), np.float32)
many, room = np.ones((4096, 8, 128), np.float32), np.zeros((8, 4096, 128), np.float32)
form = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 8, "dtype": "float32"}
store = tikv.KVCacheStore(capacity=64, **form)
pool = tikv.PagedKVCacheStore(num_blocks=8, block_size=4, **form)
seq = pool.add()
layer = tikv.ContiguousKVLayer(8, 2, 8, dtype="float32")
for _ in range(3):
    store.append(0, rows, rows)
    pool.append(0, rows, rows, [seq])
snapshot, keys = store.snapshot(), store.keys(0)
builder = tikv.GraphBuilder()
builder.copy("src", "cache", position="position")
graph, step = builder.compile(), tikv.compile_step(store, attend=False)
cache = np.zeros((2, 8, 8), np.float32)
given = {"src": rows, "cache": cache, "position": 1}
graph.run(given)
step.run(rows[None], rows[None])
tikv.copy(rows, cache, position=0)
ndarray = tikv.runtime.ti.ndarray(tikv.runtime.ti.f32, (2, 8, 8))
desc = tikv.KVCacheAppendDescriptor(
    batch_size=1, num_heads=1, new_len=1, max_cache_len=2, d_k=4, d_v=4, dtype="float32"
)
plan = tikv.KVCacheAppendPlan.select(desc)
new, old = np.ones((1, 1, 1, 4), np.float32), np.zeros((2, 1, 1, 2, 4), np.float32)
args = tikv.KVCacheAppendArgs(k_new=new, v_new=new, cache_offsets=np.array([0]), k_cache=old[0], v_cache=old[1])
plan.run(args)
"""

REFUSED = """
CALLS = [
    lambda: tikv.init(), lambda: tikv.init(arch="cpu"),
    lambda: store.append(0, rows, rows), lambda: store.append(0, many[:40, :2, :8], many[:40, :2, :8]),
    lambda: store.append_all(rows[None], rows[None]), lambda: store.tokens(0), lambda: store.attend(0, rows),
    lambda: store.trim(1), lambda: store.reset(), lambda: store.reorder([0]), lambda: store.select([0]),
    lambda: store.snapshot(), lambda: store.restore(snapshot), lambda: store.save("never.safetensors"),
    lambda: store.keys(0), lambda: keys.copy_to_host(), lambda: keys.__dlpack__(), lambda: np.asarray(keys),
    lambda: pool.append(0, rows, rows, [seq]), lambda: pool.tokens(0, seq), lambda: pool.add(), lambda: pool.fork(seq),
    lambda: pool.attend(0, rows, [seq]), lambda: pool.swap_out(seq),
    lambda: layer.set_len(1), lambda: layer.contig_write(np.ones((1, 48), np.float32), num_q_heads=2),
    lambda: graph.run(given), lambda: builder.compile(), lambda: step.run(rows[None], rows[None]),
    lambda: tikv.compile_step(store), lambda: plan.run(args), lambda: tikv.KVCacheAppendPlan.select(desc),
    lambda: tikv.copy(rows, cache, position=0), lambda: tikv.copy(many, room, position=0),
    lambda: tikv.copy(rows, ndarray, position=0), lambda: tikv.linearize(cache, np.empty_like(cache), length=8),
    lambda: tikv.quantize(rows), lambda: tikv.KVCacheStore(capacity=4, **form),
    lambda: tikv.variants.kv_cache_copy_f32(rows[0], np.zeros((4, 8), np.float32), write_pos=0),
    lambda: tikv.warmup("kv_cache_copy_f32"),
]

def all_refused():
    for call in CALLS:
        refused(call)
    assert not room.any() and len(store) == 4

in_child(all_refused)
in_child(all_refused, sys.exit)
in_child(lambda: in_child(all_refused, sys.exit), sys.exit)
"""

GOES_ON = """
store.append(0, rows, rows)
tikv.copy(many, room, position=0)
assert len(store) == 5 and room.all()
print("the parent goes on")
"""


@pytest.fixture
def forking(python):
    """Run a script that forks; none may wait for another for ever."""

    def run(script, *arguments):
        start = time.monotonic()
        # Python warns of every fork in a process that has threads.
        child = python(COMMON + script, *arguments, options=("-W", "ignore"))
        assert time.monotonic() - start < 200
        return child.stdout

    return run


def test_what_would_launch_is_refused(arch, forking):
    """In the child and in a child of that, however they end; the parent goes on."""
    assert forking(STARTED + REFUSED + GOES_ON, arch).endswith("the parent goes on\n")


ATTACHED = """
import importlib
ti = importlib.import_module(sys.argv[2])
ti.init(arch=getattr(ti, sys.argv[1]), log_level=ti.WARN, enable_fallback=False)
rows, cache = np.ones((1, 2, 8), np.float32), np.zeros((2, 8, 8), np.float32)
in_child(lambda: refused(lambda: tikv.copy(rows, cache, position=0)), sys.exit)
in_child(lambda: refused(lambda: tikv.init(arch="cpu")), sys.exit)
tikv.copy(rows, cache, position=0)
print(cache.sum())
"""


def test_an_engine_that_the_caller_started_counts_too(arch, forking):
    assert float(forking(ATTACHED, arch, runtime.engine_in_use().name).split()[-1]) == 16


MULTIPROCESSING = """
import multiprocessing
tikv.init(arch="cpu")
rows, cache = np.ones((1, 2, 8), np.float32), np.zeros((2, 8, 8), np.float32)
tikv.copy(rows, cache, position=0)
child = multiprocessing.get_context("fork").Process(target=refused, args=(lambda: tikv.copy(rows, cache, position=1),))
child.start()
child.join(30)
assert child.exitcode == 0, child.exitcode
with multiprocessing.get_context("fork").Pool(2) as pool:
    def work(_):
        tikv.copy(rows, cache, position=1)
    try:
        pool.apply_async(tikv.copy, (rows, cache), {"position": 1}).get(30)
    except tikv.StaleRuntimeError as error:
        print(error)
"""


def test_workers_of_multiprocessing(forking):
    """The error comes to the parent as it is."""
    assert "get_context('spawn')" in forking(MULTIPROCESSING)


FORKED_BEFORE = """
{before}
rows, cache = np.ones((4096, 8, 128), np.float32), np.zeros((8, 4096, 128), np.float32)
def works():
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=8, head_dim=128, capacity=4096, dtype="float32")
    for _ in range(2):
        store.append(0, rows[:1], rows[:1])
    tikv.copy(rows, cache, position=0)
    assert cache.all() and len(store) == 2
def starts_and_works():
    tikv.init(arch="cpu")
    works()
in_child(starts_and_works)
in_child(starts_and_works, sys.exit)
starts_and_works()
"""


@pytest.mark.full(unless=lambda case: case["before"] == "")
@pytest.mark.parametrize(
    "before",
    ["", "from tikv.runtime import ti", "tikv.init(arch='cpu'); from tikv.runtime import ti; ti.reset()"],
    ids=["nothing", "imported", "ended"],
)
def test_a_process_forked_before_the_start_works(forking, before):
    forking(FORKED_BEFORE.format(before=before))


STARTING = """
import threading
from tikv.runtime import start
held, go_on = threading.Event(), threading.Event()
def first():
    with start._lock:
        held.set()
        go_on.wait(60)
thread = threading.Thread(target=first)
thread.start()
held.wait()
threading.Timer(0.5, go_on.set).start()
in_child(lambda: tikv.init(arch="cpu"))
"""


def test_a_fork_waits_for_a_thread_that_starts_the_engine(forking):
    """Else the child would have the lock for ever, and half an engine."""
    forking(STARTING)
