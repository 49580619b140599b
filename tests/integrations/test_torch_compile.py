"""Calls inside of what `torch.compile` compiles: made whole, or refused before anything is written."""

import importlib
import inspect
import sys

import numpy as np
import oracle
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch._dynamo import exc, lookup_backend, trace_rules  # noqa: E402
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics  # noqa: E402

import tikv  # noqa: E402
from tikv import opaque  # noqa: E402
from tikv.arrays import runtime_of  # noqa: E402
from tikv.compat import flash_attn, flashinfer, vllm  # noqa: E402
from tikv.integrations import torch_ops  # noqa: E402
from tikv.stores.layers import growing  # noqa: E402

pytestmark = [
    pytest.mark.archs("cpu", "cuda"),
    # torch.compile's own, on some versions of Python
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

HEADS, WIDTH = 2, 8
# Older versions of torch say only that the function is not traced.
SAYS_WHY = "reason" in inspect.signature(torch.compiler.disable).parameters


@pytest.fixture(autouse=True)
def fresh():
    """What was compiled for another test would be taken for a function of the same code, ``fullgraph`` or not."""
    torch.compiler.reset()


class Graphs:
    """A back end that counts the graphs it is given, and names the files that they were made of."""

    def __init__(self, backend="eager"):
        self.compile = lookup_backend(backend)
        self.count = 0
        clear_compilation_metrics()

    def __call__(self, module, inputs):
        self.count += 1
        return self.compile(module, inputs)

    def files(self):
        return {each.co_filename for each in get_compilation_metrics()}


def public_functions():
    """Every function that a user can name, and every method of what a user can make."""
    modules = {importlib.import_module(tikv._HOMES[name]) for name in tikv.__all__ if name in tikv._HOMES}
    modules |= {
        sys.modules[base.__module__]
        for name in tikv.__all__
        if isinstance(getattr(tikv, name), type)
        for base in getattr(tikv, name).__mro__
        if base.__module__.startswith("tikv.")
    }
    modules |= {importlib.import_module(f"tikv.compat.{name}") for name in (*tikv.compat.MODULES, "seeds.variants")}
    modules |= {importlib.import_module(f"tikv.distributed.{name}") for name in ("sharded", "token_shard", "transfer")}
    modules |= {importlib.import_module(f"tikv.graphs.{name}") for name in ("builder", "graph")}
    return [function for module in modules for function in opaque.functions_of(module)]


@pytest.mark.archs("cpu")
def test_no_function_is_traced_but_those_written_for_it(arch):
    functions = public_functions()
    names = {f"{function.__module__}.{function.__qualname__}" for function in functions}
    assert {
        "tikv.ops.copy.copy", "tikv.stores.store.KVCacheStore.extend", "tikv.stores.store.KVCacheStore.load",
        "tikv.stores.store.KVCacheStore.length", "tikv.stores.pool.PagedKVCacheStore.attend",
        "tikv.compat.vllm.reshape_and_cache", "tikv.compat.seeds.variants.kv_cache_copy_seq_f32",
        "tikv.distributed.sharded.ShardedKVCacheStore.__init__", "tikv.graphs.graph.Graph.run",
    } <= names  # fmt: skip
    opaque.mark()
    for function in functions:
        written = inspect.unwrap(function)
        assert written.__code__.co_filename == "<string>" or trace_rules.check(written), function  # or of a dataclass
        assert function._torchdynamo_disable_msg == opaque.REASON, function
    from taichi.lang import kernel_impl

    assert trace_rules.check(kernel_impl.Kernel.__call__)
    for function in (torch_ops.copy_kv, torch_ops._attended, growing.GrowingLayer.recount):
        assert not trace_rules.check(function), function
        assert not hasattr(function, "_torchdynamo_disable"), function


# Each of these makes memory and gives (a call over rows (3, 2, 8), what the memory holds).


def append(new):
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, capacity=9, dtype="float32")

    def call(rows):
        store.append(0, rows, rows + 1)
        return rows * store.length

    return call, lambda: [*store.tokens(0), store.length]


def extend(new):
    store = tikv.KVCacheStore(num_layers=2, num_kv_heads=HEADS, head_dim=WIDTH, capacity=9, dtype="float32")

    def call(rows):
        with torch.no_grad():
            first = store.extend(0, rows, rows, rows + 1)
        store.append(1, first, rows)
        return store.attend(1, rows[:1][None])

    return call, lambda: [*store.tokens(0), *store.tokens(1), store.length]


def paged(new):
    store = tikv.PagedKVCacheStore(
        num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, num_blocks=8, block_size=4, dtype="float32"
    )
    seqs = [store.add(), store.add()]

    def call(rows):
        store.append(0, rows, rows + 1, seqs, [0, 2, 3])
        return store.attend(0, rows[:2], seqs)

    return call, lambda: [a for seq in seqs for a in (*store.tokens(0, seq), store.length(seq))]


def one_shot(new):
    caches, pools = [new(HEADS, 6, WIDTH) for _ in "kv"], [new(3, 4, HEADS, WIDTH) for _ in "kv"]

    def call(rows):
        tikv.copy_kv(rows, rows + 1, *caches, position=2)
        tikv.write_slots(rows, rows + 1, *pools, np.array([9, -1, 2]))
        tikv.copy_blocks(*pools, np.array([[0, 1]]))
        codes, scale = tikv.quantize(rows)
        back = tikv.dequantize(codes, scale, torch.empty_like(rows))
        ordered = torch.empty_like(caches[0])
        tikv.linearize(caches[0], ordered, length=8)
        return back + ordered[:, :3].transpose(0, 1)

    return call, lambda: [*caches, *pools]


def attention(new):
    caches, pools = [new(1, HEADS, 6, WIDTH) for _ in "kv"], [new(3, 4, HEADS, WIDTH) for _ in "kv"]

    def call(rows):
        one = tikv.decode_attention(rows[:1], *caches, np.array([4]), return_lse=True)
        other = tikv.paged_decode_attention(rows[1:2], *pools, np.array([[2, 0]]), np.array([7]), return_lse=True)
        return tikv.merge_states(*one, *other)[0]

    return call, lambda: [*caches, *pools]


def of_peers(new):
    caches, pools = [new(1, 6, HEADS, WIDTH) for _ in "kv"], [new(3, 4, HEADS, WIDTH) for _ in "kv"]

    def call(rows):
        vllm.reshape_and_cache_flash(rows, rows + 1, *pools, torch.tensor([3, 9, 0], device=rows.device), "auto")
        lens = torch.tensor([2], dtype=torch.int32, device=rows.device)
        out = flash_attn.flash_attn_with_kvcache(
            rows[None], *caches, rows[None], rows[None] + 1, cache_seqlens=lens, causal=True
        )
        return flashinfer.merge_state(out[0], rows.sum(-1), rows, rows.amax(-1))[0]

    return call, lambda: [*caches, *pools]


def step(new):
    store = tikv.KVCacheStore(
        num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, capacity=9, batch_size=3, dtype="float32"
    )
    compiled = tikv.compile_step(store, layers=0)

    def call(rows):
        return compiled.run(rows[:, None], rows[:, None] + 1, rows)

    return call, lambda: [*store.tokens(0), store.length]


def graph(new):
    builder = tikv.GraphBuilder()
    builder.copy_kv("k", "v", "k_cache", "v_cache", position="here")
    compiled, caches = builder.compile(), [new(HEADS, 6, WIDTH) for _ in "kv"]

    def call(rows):
        compiled.run({"k": rows, "v": rows + 1, "k_cache": caches[0], "v_cache": caches[1], "here": 2})
        return rows

    return call, lambda: caches


CALLS = [append, extend, paged, one_shot, attention, of_peers, step, graph]


def contents(held):
    return [a if isinstance(a, int) else oracle.to_numpy(a).copy() for a in held]


def same(got, want):
    for a, b in zip(got, want, strict=True):
        if isinstance(b, int):
            assert a == b
        else:
            oracle.assert_same_bits(a, b)


@pytest.mark.parametrize("make", CALLS, ids=lambda make: make.__name__)
def test_a_call_is_made_whole_or_not_at_all(arch, rng, make):
    """As without torch.compile, which compiles nothing of the library; and refused where a graph may not break."""
    memory, rows = [], oracle.to_torch(oracle.numbers(rng, (3, HEADS, WIDTH), np.float32), arch)

    def new(*shape):
        memory.append(oracle.to_torch(oracle.numbers(np.random.default_rng(len(shape)), shape, np.float32), arch))
        return memory[-1]

    (call, held), (plain, wanted) = make(new), make(new)

    def compiled(rows):
        return call(rows * 2) + 1

    before = contents(held()) if make not in (append, extend, paged, step) else None
    with pytest.raises(exc.Unsupported, match=r"tikv\.torch_ops, which stay in a graph" if SAYS_WHY else None):
        torch.compile(compiled, fullgraph=True, backend="eager")(rows)
    if before is None:
        assert held()[-1] == 0
    else:
        same(contents(held()), before)
    torch.compiler.reset()
    graphs = Graphs()
    function = torch.compile(compiled, backend=graphs)
    for turn in range(2):
        got, want = function(rows + turn), plain((rows + turn) * 2) + 1
        oracle.assert_same_bits(oracle.to_numpy(got), oracle.to_numpy(want))
        same(contents(held()), contents(wanted()))
    assert graphs.files() == {__file__}


class Block(torch.nn.Module):
    """One layer of a model. Its number is read where nothing is compiled: else torch makes a graph for each number."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.into, self.out = torch.nn.Linear(16, 64), torch.nn.Linear(32, 16)

    def forward(self, x, extend):
        q, k, v = self.into(x).split([32, 16, 16], -1)
        rows = (a.unflatten(-1, (-1, WIDTH)) for a in (q, k, v))
        return x + self.out(self.attend(extend, *rows).flatten(-2))

    @torch.compiler.disable
    def attend(self, extend, q, k, v):
        return extend(self.number, q, k, v)


class Model(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(number) for number in range(layers))

    def forward(self, x, extend):
        for block in self.blocks:
            x = block(x, extend)
        return x * 2


def of_a_store(layers):
    store = tikv.KVCacheStore(
        num_layers=layers, num_kv_heads=HEADS, head_dim=WIDTH, capacity=40, window=16, dtype="float32"
    )
    return store.extend


def of_a_pool(layers):
    store = tikv.PagedKVCacheStore(
        num_layers=layers, num_kv_heads=HEADS, head_dim=WIDTH, num_blocks=8, block_size=4, dtype="float32"
    )
    sequence = store.add()
    return lambda layer, q, k, v: store.extend(layer, q, k, v, [sequence], [0, len(k)])


@pytest.mark.parametrize(
    "make", [of_a_store, pytest.param(of_a_pool, marks=pytest.mark.full)], ids=["contiguous", "paged"]
)
def test_twenty_steps_take_the_graphs_of_the_first(arch, rng, make):
    """Of ten layers, which are more than torch compiles one function for."""
    torch.manual_seed(0)
    model = Model(10).to(arch).eval()
    graphs, extend, plain = Graphs(), make(10), make(10)
    compiled = torch.compile(model, backend=graphs)
    counts = []
    with torch.no_grad():
        for tokens in (9, *20 * [1]):
            x = oracle.to_torch(oracle.numbers(rng, (tokens, 16), np.float32), arch)
            torch.testing.assert_close(compiled(x, extend), model(x, plain), rtol=0, atol=0)
            counts.append(graphs.count)
    # Two graphs of a block, before and behind the store, of a prompt and of one token; older torch: of each block.
    assert counts[0] == 2 or (counts[0] == 20 and not SAYS_WHY)
    assert counts[1:] == 20 * [2 * counts[0]]
    assert graphs.files() == {__file__}


@pytest.mark.parametrize("copy_kv", [tikv.copy_kv, torch_ops.copy_kv], ids=["call", "operator"])
def test_a_position_that_counts_up_takes_two_graphs(arch, rng, copy_kv):
    """For the first and for all others."""
    graphs, counts = Graphs("aot_eager"), []
    got, want = ([oracle.to_torch(np.zeros((HEADS, 30, WIDTH), np.float32), arch) for _ in "kv"] for _ in range(2))

    def step(rows, position):
        copy_kv(rows * 2, rows, *got, position=position)

    compiled = torch.compile(step, backend=graphs)
    for position in range(20):
        rows = oracle.to_torch(oracle.numbers(rng, (1, HEADS, WIDTH), np.float32), arch)
        compiled(rows, position)
        tikv.copy_kv(rows * 2, rows, *want, position=position)
        counts.append(graphs.count)
    same(contents(got), contents(want))
    assert counts == [1, *19 * [2]]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_a_decode_step_by_operators_is_one_graph_for_all_positions(arch, rng, backend):
    """They are in a tensor, so that ``dynamic=False`` compiles no step again."""
    graphs = Graphs(backend)
    start = oracle.to_torch(np.array([0, 5], np.int32), arch)
    caches = [oracle.to_torch(oracle.numbers(rng, (2, HEADS, 30, WIDTH), np.float32), arch) for _ in "kv"]
    state, plain = [*caches, start], [a.clone() for a in (*caches, start)]

    def step(x, k_cache, v_cache, lens):
        torch_ops.append_ragged(x[:, :2, None] * 2, x[:, 2:, None], k_cache, v_cache, lens)
        lens.add_(1)
        return torch_ops.decode_attention(x, k_cache, v_cache, lens) * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend=graphs)
    for _ in range(20):
        x = oracle.to_torch(oracle.numbers(rng, (2, 4, WIDTH), np.float32), arch)
        oracle.assert_same_bits(oracle.to_numpy(compiled(x, *state)), oracle.to_numpy(step(x, *plain)))
    same(contents(state), contents(plain))
    assert graphs.count == 1


@pytest.fixture
def llama(arch, one_thread):
    """A tiny model of transformers, a `TikvCache` with and without a prompt, and how the model is called with one."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from model_cache import BASE, given

    from tikv.integrations.transformers import TikvCache

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**BASE | {"num_hidden_layers": 1})).to(arch).eval()
    ids = torch.randint(1, 97, (1, 9), device=arch)

    def cache(prompted=True):
        made = TikvCache(model.config, 40)
        if prompted:
            model(ids, **given(made))
        return made

    with torch.no_grad():
        yield model, cache, given


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("options", "graphs"),
    [({"fullgraph": True}, [1, *19 * [2]]), pytest.param({"dynamic": False}, None, marks=pytest.mark.full)],
)
def test_twenty_steps_of_a_model_of_transformers(llama, options, graphs):
    """A graph of the whole model for the first length and one for all others; without dynamic shapes, of its parts."""
    model, cache, given = llama
    backend, got, plain, counts = Graphs(), cache(), cache(), []
    compiled = torch.compile(model, backend=backend, **options)
    for token in range(20):
        ids = torch.tensor([[token]], device=model.device)
        torch.testing.assert_close(
            compiled(ids, **given(got)).logits, model(ids, **given(plain)).logits, rtol=0, atol=1e-5
        )
        counts.append(backend.count)
    assert got.get_seq_length() == 29
    if graphs:
        assert counts == graphs
    assert counts[10:] == 10 * [counts[10]]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("prompted", "options", "reason"),
    [
        (False, {}, r"run the prompt or early_initialization\(\) outside"),
        (True, {"dynamic": False}, r"Leave dynamic out, or use dynamic=True"),
    ],
)
def test_what_a_whole_graph_cannot_have_is_said_before_a_token_is_cached(llama, prompted, options, reason):
    model, cache, given = llama
    made, plain = cache(prompted), cache(prompted)
    ids = torch.tensor([[5]], device=model.device)
    compiled = torch.compile(model, backend="eager", fullgraph=True, **options)
    for _ in range(2):
        with pytest.raises(exc.Unsupported, match=f"TikvCache.*{reason}" if SAYS_WHY else None):
            compiled(ids, **given(made))
        assert made.get_seq_length() == 9 * prompted
    torch.testing.assert_close(model(ids, **given(made)).logits, model(ids, **given(plain)).logits, rtol=0, atol=0)


COLD = """
import sys
{imports}
assert not set(tikv.engines.ALL) & set(sys.modules)
from torch._dynamo import exc
from torch._dynamo.utils import get_compilation_metrics
rows = torch.arange(48.0).view(3, 2, 8)

def step(rows, cache):
    tikv.copy(rows * 2, cache, position=1)  # of which tikv knows the name alone
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=8, capacity=9, dtype="float32")
    return store.extend(0, rows, rows, rows) + 1, store.length

cache = torch.zeros(2, 6, 8)
try:
    torch.compile(step, fullgraph=True, backend="eager")(rows, cache)
except exc.Unsupported as error:
    print("tikv.torch_ops" in str(error), bool(cache.any()))
assert not set(tikv.engines.ALL) & set(sys.modules)
torch.compiler.reset()
tikv.init(arch="cpu")
out, length = torch.compile(step, backend="eager")(rows, cache)
want, _ = step(rows, torch.zeros(2, 6, 8))
print(torch.equal(out, want), length, bool((cache[:, 1:4] == rows.transpose(0, 1) * 2).all()), float(cache.sum()))
print({{each.co_filename for each in get_compilation_metrics()}})
"""


@pytest.mark.archs("cpu")
def test_a_cache_with_other_room_needs_no_other_kernel(arch):
    """Tokens that compiled code reads at once are written by one kernel, however long the text is."""
    from model_cache import build, given

    from tikv.integrations.transformers import TikvCache

    model, live, kernels, rooms = build(arch), runtime_of(), [], set()
    call = torch.compile(model.forward, backend="eager", dynamic=True)
    with torch.no_grad():
        for tokens in (150, 260, 333):
            cache = TikvCache(model.config)
            model(torch.ones((1, tokens), dtype=torch.long), **given(cache))
            for _ in range(2):
                call(torch.ones((1, 2), dtype=torch.long), **given(cache))
            assert cache.get_seq_length() == tokens + 4
            rooms.add(cache.layers[0].store.capacity)
            kernels.append(len(live.kernels))
    assert len(rooms) == 3
    assert len({*kernels}) == 1


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    "imports", ["import tikv, torch", pytest.param("import torch._dynamo, tikv", marks=pytest.mark.full)]
)
def test_the_first_call_of_a_process_is_made_in_compiled_code(arch, python, imports):
    """No engine is imported, no kernel compiled; whatever comes first, this library or torch's compiler."""
    child = python(COLD.format(imports=imports))
    assert child.stderr == ""
    assert child.stdout == f"{SAYS_WHY} False\nTrue 3 True 2256.0\n{{'<string>'}}\n"


COLD_CACHE = """
import sys, torch, transformers, tikv
from model_cache import BASE, given
from tikv.integrations.transformers import TikvCache

torch.manual_seed(0)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**BASE | {"num_hidden_layers": 1})).eval()
cache, ids = TikvCache(model.config, 40), torch.randint(1, 97, (1, 9))
assert not set(tikv.engines.ALL) & set(sys.modules)
with torch.no_grad():
    got = torch.compile(model, backend="eager")(ids, **given(cache)).logits
    print(torch.equal(got, model(ids).logits), cache.get_seq_length())
"""


@pytest.mark.archs("cpu")
@pytest.mark.full
def test_the_first_prompt_of_a_process_is_read_by_a_compiled_model(arch, python):
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert python(COLD_CACHE).stdout == "True 9\n"
