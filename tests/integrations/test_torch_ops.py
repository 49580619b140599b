"""torch and DLPack: the same memory both ways, and the operations as operators that torch.compile keeps whole."""

import contextlib

import numpy as np
import oracle
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import tikv  # noqa: E402
from tikv import dtypes, reference  # noqa: E402
from tikv.arrays import last_call  # noqa: E402
from tikv.integrations import torch_ops  # noqa: E402
from tikv.integrations.transformers.memory import stored_ops  # noqa: E402

pytestmark = [
    pytest.mark.archs("cpu", "cuda"),
    # torch.compile's own, on some versions of Python
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

STORED = ["float32", "float16", "bfloat16", "int8"]


def tensor(array, arch):
    return oracle.to_torch(array, arch)


def contents(x):
    return oracle.to_numpy(x)


@pytest.mark.parametrize("name", STORED)
def test_a_store_is_torch_memory(arch, rng, name):
    store = tikv.KVCacheStore(num_layers=2, num_kv_heads=3, head_dim=8, capacity=5, dtype=name)
    keys = store.keys(1)
    seen = keys.torch()
    assert seen.dtype is getattr(torch, name)
    assert tuple(seen.shape) == (1, 3, 5, 8)
    assert seen.device.type == arch
    before = oracle.random_bits(rng, (1, 3, 5, 8), dtypes.parse(name, "test").numpy)
    seen.copy_(tensor(before, arch))
    oracle.assert_same_bits(keys.copy_to_host(), before, what="what torch wrote, in the store")
    del store
    oracle.assert_same_bits(contents(seen), before, what="torch's view after the store is gone")


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_torch_memory_is_written_in_place(arch, rng, name):
    dtype = dtypes.parse(name, "test").numpy
    cache = [oracle.random_bits(rng, (2, 6, 8), dtype) for _ in "kv"]
    rows = [oracle.random_bits(rng, (3, 2, 8), dtype) for _ in "kv"]
    caches = [tensor(a.copy(), arch) for a in cache]
    pointers = [c.data_ptr() for c in caches]
    # A slice of a larger tensor, as a fused projection gives it.
    wide = tensor(np.concatenate(rows, axis=-1), arch)
    tikv.copy_kv(wide[..., :8], wide[..., 8:], *caches, position=2)
    for row, before, after, pointer in zip(rows, cache, caches, pointers, strict=True):
        assert after.data_ptr() == pointer
        oracle.assert_same_bits(contents(after), reference.copy(row, before, position=2))


def put_in(tensor, other):
    tensor.data = other
    return tensor


CHANGES = {
    "nothing": lambda k: k,
    "another tensor": lambda k: k.clone(),
    "another alignment": lambda k: torch.cat([k.flatten()[:1], k.flatten()])[1:].view(k.shape),
    "a gradient": lambda k: k.clone().requires_grad_(),
    "a parameter": lambda k: torch.nn.Parameter(k),
    "different strides": lambda k: k.transpose(0, 1).contiguous().transpose(0, 1),
    "different strides in place": lambda k: k.as_strided_((3, 2, 8), (8, 24, 1)),
    "other memory": lambda k: put_in(torch.empty_like(k), k.clone()),
    "other memory and strides": lambda k: put_in(torch.empty_like(k), k.transpose(0, 1).contiguous().transpose(0, 1)),
    "a negation": lambda k: torch._neg_view(-k).resolve_neg(),
}


@pytest.fixture
def forget_calls(monkeypatch):
    """A function that forgets the forms of earlier calls; if not `guarded`, torch's guards are not used either."""

    def forget(guarded=True):
        monkeypatch.setattr(last_call, "_last_calls", {})
        if not guarded:
            monkeypatch.setattr(last_call, "_torch_guards", False)

    return forget


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_call_is_given_after_others_like_it(arch, rng, forget_calls, change, guarded, mode):
    """Tensors of the forms of the call before are not looked at anew; any other difference is seen."""
    forget_calls(guarded)
    numbers = [oracle.random_bits(rng, (3, 2, 8), np.float32) for _ in range(4)]
    cache = [oracle.random_bits(rng, (2, 6, 8), np.float32) for _ in "kv"]
    caches = [tensor(a.copy(), arch) for a in cache]
    for row in numbers:
        k, v = (tensor(a.copy(), arch).clone() for a in (row, numbers[0]))  # aligned as torch does it
        tikv.copy_kv(k, v, *caches, position=1)
    assert (last_call._last_calls["copy_kv"].fits is not None) == guarded
    for step in range(3):
        row = oracle.random_bits(rng, (3, 2, 8), np.float32)
        with mode():
            k = CHANGES[change](tensor(row.copy(), arch).clone())
            tikv.copy_kv(k, v, *caches, position=step)
        cache = [
            reference.copy(contents(a.detach()), b, position=step)
            for a, b in zip((k, v), [contents(c).copy() for c in caches], strict=True)
        ]
        for name, want, got in zip("kv", cache, caches, strict=True):
            oracle.assert_same_bits(contents(got), want, what=f"{name} at step {step}")


REFUSED = {
    "another shape": (lambda k: k[:, :, :4], tikv.ShapeError),
    "one token more": (lambda k: torch.cat([k, k]), tikv.ShapeError),
    "another dtype": (lambda k: k.half(), tikv.DTypeError),
    "lazily negated": (lambda k: torch._neg_view(k), tikv.DTypeError),
    "sparse": (lambda k: k.to_sparse(), tikv.DTypeError),
    "without memory": (lambda k: k.to("meta"), tikv.ArchError),
    "a gap": (lambda k: torch.cat([k, k], 2)[:, :, ::2], tikv.ShapeError),
    "the cache itself": (None, tikv.ShapeError),
    "no tensor": (lambda k: "k", tikv.DTypeError),
}


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("wrong", REFUSED)
def test_what_does_not_fit_is_refused_after_calls_that_did(arch, rng, forget_calls, wrong, guarded):
    forget_calls(guarded)
    memory = tensor(oracle.random_bits(rng, (2, 6, 8), np.float32), arch)
    caches = [memory, memory.clone()]
    k, v = (tensor(oracle.random_bits(rng, (3, 2, 8), np.float32), arch) for _ in "kv")
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=8, capacity=99, dtype="float32")
    for _ in range(3):
        tikv.copy_kv(k, v, *caches, position=1)
        store.append(0, k, v)
    make, error = REFUSED[wrong]
    given = memory.transpose(0, 1)[:3] if make is None else make(k)
    before = [contents(c).copy() for c in caches]
    for _ in range(3):
        with pytest.raises(error, match=r"^copy_kv: "):
            tikv.copy_kv(given, v, *caches, position=1)
        own = store.keys(0).torch()[0].transpose(0, 1)[:3] if make is None else given
        with pytest.raises(error, match=r"^KVCacheStore\.append: "):
            store.append(0, own, v)
    for name, old, new in zip("kv", before, caches, strict=True):
        oracle.assert_same_bits(contents(new), old, what=name)
    assert store.length == 9


@pytest.mark.parametrize("moved", [False, True])
def test_tensors_that_come_again_are_known_by_torchs_guards(arch, forget_calls, moved):
    """The very tensors of the call before, or others of their forms."""
    if not last_call._find_torch_guards(torch):
        pytest.skip("this torch has no such guards")
    forget_calls()
    given = [tensor(np.ones((1, 2, 8), np.float32), arch).clone() for _ in range(3)]  # aligned as torch does it
    cache = tensor(np.zeros((2, 4, 8), np.float32), arch)
    for n in range(3):
        tikv.copy(given[n if moved else 0], cache, position=n)
    assert last_call._last_calls["copy"].fits(given[0], cache)


def test_guards_that_overlook_something_are_not_used(monkeypatch):
    class Blind:
        def __init__(self, *tensors, **dims):
            pass

        def check(self, *tensors):
            return True

    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", Blind)
    assert last_call._find_torch_guards(torch) is None


@pytest.mark.archs("cpu")
@pytest.mark.full(unless=lambda case: case["kept"] == "capsule")
@pytest.mark.parametrize("kept", ["seen", "capsule", "store"])
def test_what_is_alive_at_the_end_dies_quietly(arch, kept, python):
    lines = (
        "import tikv, torch",
        "tikv.init(arch='cpu')",
        "store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=4, capacity=4)",
        "seen, capsule = store.keys(0).torch(), store.values(0).__dlpack__()",
        f"del {', '.join({'seen', 'capsule', 'store'} - {kept})}",
        "print('done')",
    )
    child = python("\n".join(lines))
    assert (child.stdout, child.stderr) == ("done\n", "")


class Producer:
    """Another library's array: all it shows is DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **requests):
        return self.array.__dlpack__(**requests)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_dlpack_goes_in_and_out(arch, rng, name):
    dtype = dtypes.parse(name, "test").numpy
    before, row = oracle.random_bits(rng, (2, 4, 8), dtype), oracle.random_bits(rng, (1, 2, 8), dtype)
    cache = tensor(before.copy(), arch)
    tikv.copy(Producer(tensor(row, arch)), Producer(cache), position=3)
    oracle.assert_same_bits(contents(cache), reference.copy(row, before, position=3))
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=8, capacity=4, dtype=name)
    back = torch.from_dlpack(store.values(0))
    back.copy_(cache[None])
    oracle.assert_same_bits(store.values(0).copy_to_host(), contents(cache)[None])


@pytest.mark.archs("cpu")
def test_numpy_takes_a_store_through_dlpack(arch, rng):
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=4, capacity=3, dtype="float32")
    seen = np.from_dlpack(store.keys(0))
    store.keys(0).numpy()[...] = wanted = oracle.random_bits(rng, seen.shape, np.float32)
    oracle.assert_same_bits(seen, wanted)  # NumPy makes what comes through DLPack read-only


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_jax_rows_are_read_and_a_store_is_seen(arch, rng, name):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    dtype = dtypes.parse(name, "test").numpy
    before, row = oracle.random_bits(rng, (2, 4, 8), dtype), oracle.random_bits(rng, (1, 2, 8), dtype)
    cache = before.copy()
    tikv.copy(jax.numpy.asarray(row), cache, position=1)
    oracle.assert_same_bits(cache, reference.copy(row, before, position=1))
    with pytest.raises(tikv.ShapeError, match="read-only"):
        tikv.copy(row, jax.numpy.asarray(before), position=1)
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=8, capacity=4, dtype=name)
    store.append(0, row, row)
    oracle.assert_same_bits(np.asarray(jax.dlpack.from_dlpack(store.keys(0))), store.keys(0).numpy())


def pools(rng, dtype, arch):
    return [tensor(oracle.random_bits(rng, (3, 4, 2, 8), dtype), arch) for _ in "kv"]


def whole(function, *arguments):
    """Call a function compiled in one graph: a graph break is an error."""
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")(*arguments)


def test_copy_kv_is_compiled_whole(arch, rng):
    rows = [tensor(oracle.numbers(rng, (2, 2, 8), np.float32), arch) for _ in "kv"]
    before = [tensor(oracle.random_bits(rng, (2, 6, 8), np.float32), arch) for _ in "kv"]

    def step(k, v, k_cache, v_cache):
        torch_ops.copy_kv(k * 2, v + 1, k_cache, v_cache, position=7, window=5)
        return k_cache.view(torch.int32) + 0

    got, want = [b.clone() for b in before], [contents(b) for b in before]
    returned = whole(step, *rows, *got)
    new = [contents(rows[0] * 2), contents(rows[1] + 1)]
    for row, old, after in zip(new, want, got, strict=True):
        oracle.assert_same_bits(contents(after), reference.copy(row, old, position=7, window=5))
    oracle.assert_same_bits(
        contents(returned), contents(got[0].view(torch.int32)), what="the cache as read after the write"
    )


@pytest.mark.parametrize("name", ["float16", "int8"])
def test_write_slots_is_compiled_whole(arch, rng, name):

    dtype = dtypes.parse(name, "test").numpy
    rows = [tensor(oracle.numbers(rng, (3, 2, 8), np.float32), arch) for _ in "kv"]
    scales = (
        [tensor(oracle.random_bits(rng, (3, 4, 2), np.float16), arch) for _ in "kv"] if name == "int8" else [None] * 2
    )
    before = pools(rng, dtype, arch)
    slots = tensor(np.array([9, -1, 2], np.int32), arch)

    def step(k, v, k_pool, v_pool, k_scale, v_scale):
        torch_ops.write_slots(k, v, k_pool, v_pool, slots, k_scale=k_scale, v_scale=v_scale)

    def copies():
        return [None if a is None else a.clone() for a in (*before, *scales)]

    got, want = copies(), copies()
    whole(step, *rows, *got)
    tikv.write_slots(*rows, *want[:2], slots, k_scale=want[2], v_scale=want[3])
    changed = 0
    for a, b, old in zip(got, want, (*before, *scales), strict=True):
        if a is not None:
            oracle.assert_same_bits(contents(a), contents(b))
            changed += not np.array_equal(oracle.bits(contents(a)), oracle.bits(contents(old)))
    assert changed == sum(a is not None for a in got)


@pytest.mark.parametrize("queries", [1, 3])
def test_decode_attention_is_compiled_whole(arch, rng, queries):

    q = tensor(oracle.numbers(rng, (2, 4, queries, 8), np.float32), arch)
    k, v = (tensor(oracle.numbers(rng, (2, 2, 6, width), np.float32), arch) for width in (8, 5))
    lens = tensor(np.array([6, 4], np.int32), arch)

    def step(q, k, v, lens):
        out, lse = torch_ops.decode_attention(q, k, v, lens, window=3, return_lse=True)
        return out * 1, lse * 1

    got = whole(step, q, k, v, lens)
    want = tikv.decode_attention(q, k, v, lens, window=3, return_lse=True)
    assert tuple(got[0].shape) == (2, 4, queries, 5)
    for a, b in zip(got, want, strict=True):
        oracle.assert_same_bits(contents(a), contents(b))


def test_chosen_tokens_are_an_argument(arch, rng):
    """Of both operators, eagerly; the schema is looked at below."""
    q = tensor(oracle.numbers(rng, (2, 4, 8), np.float32), arch)
    k, v = (tensor(oracle.numbers(rng, (2, 2, 8, 8), np.float32), arch) for _ in "kv")
    lens, chosen = (tensor(np.array(a), arch) for a in ([6, 4], [[[5, 0]], [[1, -1]]]))
    got = torch_ops.decode_attention(q, k, v, lens, indices=chosen)
    oracle.assert_same_bits(contents(got), contents(tikv.decode_attention(q, k, v, lens, indices=chosen)))
    pools = [a.reshape(4, 4, 2, 8) for a in (k, v)]
    table = tensor(np.array([[2, 0], [1, 3]]), arch)
    got = torch_ops.paged_decode_attention(q, *pools, table, lens, indices=chosen)
    want = tikv.paged_decode_attention(q, *pools, table, lens, indices=chosen)
    oracle.assert_same_bits(contents(got), contents(want))


@pytest.mark.parametrize("layout", ["NHD", "HND", "VLLM"])
def test_paged_decode_attention_is_compiled_whole(arch, rng, layout):

    shapes = {
        "NHD": [(3, 4, 2, 8)] * 2,
        "HND": [(3, 2, 4, 8)] * 2,
        "VLLM": [(3, 2, 2, 4, 4), (3, 2, 8, 4)],
    }[layout]
    k, v = (tensor(oracle.numbers(rng, shape, np.float32), arch) for shape in shapes)
    q = tensor(oracle.numbers(rng, (2, 4, 8), np.float32), arch)
    tables, lens = tensor(np.array([[2, 0], [1, -1]], np.int32), arch), tensor(np.array([7, 3], np.int32), arch)

    def step(q):
        return torch_ops.paged_decode_attention(q, k, v, tables, lens, layout=layout) * 1

    want = tikv.paged_decode_attention(q, k, v, tables, lens, layout=layout)
    oracle.assert_same_bits(contents(whole(step, q)), contents(want))


def operator_calls(rng, arch):
    """Calls of each operator, by its name in `torch.ops.tikv`, with all arguments that its schema has."""

    def numbers(*shape, dtype=np.float32):
        return tensor(oracle.numbers(rng, shape, dtype), arch)

    def integers(*values):
        return tensor(np.array(values, np.int32), arch)

    fused = numbers(2, 2, 24)
    rows, caches = [fused[..., :8], fused[..., 8:16]], [numbers(2, 6, 8) for _ in "kv"]
    pools = [numbers(3, 4, 2, 8) for _ in "kv"]
    vllm = [numbers(3, 2, 2, 4, 4), numbers(3, 2, 8, 4)]
    codes = [tensor(rng.integers(-127, 128, (3, 4, 2, 8)).astype(np.int8), arch) for _ in "kv"]
    scales = [tensor(np.exp2(rng.integers(-6, 0, (3, 4, 2))).astype(np.float16), arch) for _ in "kv"]
    slots, lens, table = integers(9, -1), integers(6, 4), integers([2, 0], [1, -1])
    one, several = numbers(2, 4, 8), numbers(2, 3, 4, 8).transpose(1, 2)
    batch = numbers(2, 2, 6, 8), numbers(2, 2, 6, 5)
    yield "copy_kv", (*rows, *caches, 1, None, None, 0, "token_major", "head_major")
    yield "copy_kv", (*(a.transpose(0, 1) for a in rows), *caches, 7, 5, 1, 1, "head_major", "head_major")
    yield "append_ragged", (numbers(2, 2, 3, 8), numbers(2, 2, 3, 5), *batch, integers(-1, 4))
    yield "write_slots", (*rows, *pools, slots, "NHD", None, None)
    yield "write_slots", (*rows, *vllm, slots, "VLLM", None, None)
    yield "write_slots", (*rows, *codes, slots, "NHD", *scales)
    yield "decode_attention", (one, *batch, lens, None, True, None, False, 0, None, None, None)
    yield "decode_attention", (several, *batch, lens, 0.5, True, 3, False, 0, None, None, 5.0)
    chosen = integers([[3, 0]], [[1, -1]])
    yield "decode_attention", (one, *batch, lens, None, True, None, False, 0, None, None, None, chosen)
    yield "paged_decode_attention", (one, *pools, table, integers(7, 3), "NHD", None, None, None, None, True, None)
    yield "paged_decode_attention", (one, *codes, table, integers(7, 3), "NHD", None, 3, *scales, True, None)
    yield "paged_decode_attention", (several, *vllm, table, integers(7, 3), "VLLM", 0.5, None, None, None, True, None)
    plain = [numbers(2, 2, 6, 8) for _ in "kv"]
    yield "append_stored", (*[numbers(2, 2, 1, 8) for _ in "kv"], *plain, None, None, integers(3, 4), 0, 0, "", "")
    yield "attend_stored", (numbers(2, 4, 1, 8), *plain, None, None, lens, None, None, None, 8, "", "")
    starts = integers(1, 0)
    yield "attend_stored", (numbers(2, 4, 1, 8), *plain, None, None, lens, None, None, None, 8, "", "", starts)
    yield "decode_stored", (plain[0], None, 8, "")
    yield "note_use_of_state", (numbers(2, 3, 4), integers(5))


def test_the_operators_say_what_they_do(arch, rng):
    """By all of torch's own checks: schema, aliasing, mutation, autograd, and the fake implementation against the real.

    The first call of each compiles its kernel, inside of torch's own tracing.
    """
    checked = set()
    for name, arguments in operator_calls(rng, arch):
        found = torch.library.opcheck(getattr(torch.ops.tikv, name), arguments)
        assert set(found) >= {
            "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
        }  # fmt: skip
        assert set(found.values()) == {"SUCCESS"}, (name, found)
        checked.add(f"tikv::{name}")
    assert checked == {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("tikv::")}


@pytest.mark.archs("cpu")
def test_old_versions_of_torch_can_read_the_signatures(arch):
    """Torch 2.4 takes no annotation that is text, as all are behind `from __future__ import annotations`."""
    operators = [*vars(torch_ops).values(), *vars(stored_ops).values()]
    made = [each for each in operators if isinstance(each, torch.library.CustomOpDef)]
    assert len(made) == 9
    annotations = [a for each in made for a in each._init_fn.__annotations__.values()]
    assert annotations
    assert not any(isinstance(a, str) for a in annotations)


def test_attention_whose_fake_result_is_of_another_form_is_found(arch, rng):
    """The checks can fail."""
    q, k, v = (tensor(oracle.numbers(rng, (1, 2, *shape), np.float32), arch) for shape in ((8,), (6, 8), (6, 8)))

    @torch.library.custom_op("tikv_test::attention", mutates_args=())
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tikv.decode_attention(q, k, v, np.array([4]))

    @attention.register_fake
    def _(q, k, v):
        return q.new_empty((*q.shape, 1))

    with pytest.raises(torch.testing._internal.optests.generate_tests.OpCheckError, match="test_faketensor"):
        torch.library.opcheck(attention, (q, k, v))


@pytest.mark.parametrize("paged", [False, True])
def test_no_gradient_is_made_up(arch, rng, paged):
    q = tensor(oracle.numbers(rng, (1, 4, 8), np.float32), arch).requires_grad_()
    k, v = (tensor(oracle.numbers(rng, (3, 4, 2, 8) if paged else (1, 2, 6, 8), np.float32), arch) for _ in "kv")
    one = tensor(np.array([4], np.int32), arch)
    table = [tensor(np.array([[2, 0]], np.int32), arch)] if paged else []
    call = torch_ops.paged_decode_attention if paged else torch_ops.decode_attention
    wrong = "torch_ops: gradients do not flow through attention"
    with torch.no_grad():
        assert not call(q, k, v, *table, one).requires_grad
    with pytest.raises(tikv.OptionError, match=f"^{wrong}"):
        call(q, k, v, *table, one).sum().backward()
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=f"OptionError: {wrong}"):
        torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v, *table, one)  # it makes both ways at once
    assert q.grad is None


def test_a_refusal_passes_through_the_operator(arch):
    from tikv.integrations import torch_ops

    cache = torch.zeros(2, 4, 8, device=arch)
    with pytest.raises(tikv.CapacityError, match="capacity=4"):
        torch_ops.copy_kv(
            torch.ones(1, 2, 8, device=arch), torch.ones(1, 2, 8, device=arch), cache, cache.clone(), position=4
        )
