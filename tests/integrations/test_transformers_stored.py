"""What `TikvCache.update` returns of codes under attention by the name "tikv": read in place, or decoded when used."""

import copy
import gc
import io

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from model_cache import BASE, generate, prompts  # noqa: E402

from tikv.integrations.transformers import TikvCache  # noqa: E402
from tikv.integrations.transformers.attention import attend as by_name  # noqa: E402
from tikv.integrations.transformers.memory import slots  # noqa: E402
from tikv.integrations.transformers.memory.slots import CacheSlots  # noqa: E402
from tikv.integrations.transformers.memory.stored import StoredTensor  # noqa: E402

pytestmark = [
    pytest.mark.archs("cpu"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_thread"),
]

EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
REWORKING = {
    "JetMoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8},  # repeats keys and values
    "DiffLlama": {},  # cuts values in halves and joins them
    "Doge": {"keep_window_size": 4},  # computes a mask from values
    "DeepseekV3": {**LATENT, **EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},  # expands latent vectors
}


def build(family):
    options = {**BASE, **REWORKING[family], "num_hidden_layers": 2}
    if family == "DeepseekV3":
        options = {name: value for name, value in options.items() if name != "head_dim"} | {"num_key_value_heads": 4}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**options)
    config.initializer_range = 0.3
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.mark.parametrize("family", REWORKING)
@pytest.mark.parametrize("dtype", ["int8", "float16"])
def test_models_that_rework_what_update_returns(arch, family, dtype):
    """The logits are those that torch's attention gives of the same stored numbers, in padded batches too."""
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    model = build(family)
    for inputs in (prompts(9), prompts(4, 9)):
        found = []
        for attention in (model.config._attn_implementation, "tikv"):
            model.set_attn_implementation(attention)
            got = generate(model, TikvCache(model.config, dtype=dtype), inputs, 8)
            found.append(torch.stack(got.logits))
        # A difference of rounding can move a stored value to its neighbour.
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=0.05 if dtype == "int8" else 0.01)
        assert found[0].std() > 0.5


def numbers(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


@pytest.fixture
def cache():
    """Of two full layers, int8, for attention by name, with some tokens."""
    config = transformers.LlamaConfig(**{**BASE, "num_hidden_layers": 2}, attn_implementation="tikv")
    return TikvCache(config, dtype="int8")


def filled(cache, rng, layer=0, tokens=5):
    """What `update` returns of one more token, and the numbers that it has to be."""
    with torch.no_grad():
        cache.update(numbers(rng, 2, 2, tokens, 8), numbers(rng, 2, 2, tokens, 8), layer)
        pair = cache.update(numbers(rng, 2, 2, 1, 8), numbers(rng, 2, 2, 1, 8), layer)
    return pair, (cache.layers[layer].keys.clone(), cache.layers[layer].values.clone())


def test_only_the_pair_of_an_update_is_read_in_place(arch, rng, cache, read):
    """Another tensor in the place of one of them is attended as it was given, and so is the other."""
    (k, v), numbers_of = filled(cache, rng)
    (other_k, other_v), others = filled(cache, rng, layer=1)
    assert type(k) is type(v) is StoredTensor
    assert (k.shape, k.dtype, k.stride(), v.device) == ((2, 2, 6, 8), torch.float32, (96, 48, 8, 1), v.device)
    q, module = numbers(rng, 2, 4, 1, 8), torch.nn.Module()
    in_place, as_given = (torch.int8, torch.int8), (torch.float32, torch.float32)
    cases = [
        (lambda: (k, v), numbers_of, in_place),
        (lambda: (other_k, other_v), others, in_place),
        (lambda: (k, other_v), (numbers_of[0], others[1]), as_given),
        (lambda: (v, k), numbers_of[::-1], as_given),
        (lambda: (k * 2, v), (numbers_of[0] * 2, numbers_of[1]), as_given),
        (lambda: (k, v[:, :, :, :4]), (numbers_of[0], numbers_of[1][..., :4]), as_given),
        (lambda: (k, v), numbers_of, as_given),  # since it was used by then
    ]
    with torch.no_grad():
        for given, same, how in cases:
            read.clear()
            got = by_name.attend(module, q, *given(), None)[0]
            want = by_name.attend(module, q, *same, None)[0]
            assert read == [how, as_given]
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_a_decode_loop_reads_the_cache_where_it_lies(arch, rng, dtype, monkeypatch):
    """Through growing memory and other shares of the keys, with other queries in between: few calls are new."""
    config = transformers.LlamaConfig(**{**BASE, "num_hidden_layers": 1}, attn_implementation="tikv")
    cache, module, checked, call = TikvCache(config, dtype=dtype), torch.nn.Module(), [], slots.attention_call
    monkeypatch.setattr(slots, "attention_call", lambda *args: (checked.append(1), call(*args))[1])
    with torch.no_grad():
        cache.update(numbers(rng, 2, 2, 200, 8), numbers(rng, 2, 2, 200, 8), 0)
        for step in range(400):
            k, v = cache.update(numbers(rng, 2, 2, 1, 8), numbers(rng, 2, 2, 1, 8), 0)
            q = numbers(rng, 2, 4, 1, 8).clone()  # aligned as torch's tensors are
            options = {"scaling": 0.7 if step % 100 == 7 else None, "softcap": 3.0 if step % 100 == 8 else None}
            if step % 100 == 9:
                q = numbers(rng, 2, 1, 4, 16)[..., ::2].transpose(1, 2)
            got = by_name.attend(module, q, k, v, None, **options)[0]
            keys, values = (a.repeat_interleave(2, 1) for a in cache.layers[0]._read(0, 201 + step))
            scores = q @ keys.transpose(2, 3) * (options["scaling"] or 8**-0.5)
            scores = 3 * torch.tanh(scores / 3) if options["softcap"] else scores
            torch.testing.assert_close(got, (scores.softmax(-1) @ values).transpose(1, 2), rtol=1e-4, atol=1e-5)
    assert len(checked) < 150


PARTS = {
    "all": (lambda k, v: (k, v), True),
    "changed in place": (lambda k, v: (k.mul_(2), v), True),
    "behind the first": (lambda k, v: (k[:, :, 1:], v[:, :, 1:]), False),
    "exchanged": (lambda k, v: (v, k), False),
    "of another layer": (lambda k, v: (k, v.clone()), False),
    "turned": (lambda k, v: (k.transpose_(0, 1), v.transpose_(0, 1)), False),
    "replaced": (lambda k, v: (setattr(k, "data", k.data.clone()), (k, v))[1], False),
}


@pytest.mark.parametrize(("part", "in_place"), PARTS.values(), ids=PARTS)
def test_numbers_are_read_in_place_only_where_they_are_the_cache(arch, rng, part, in_place, monkeypatch):
    config = transformers.LlamaConfig(**{**BASE, "num_hidden_layers": 1}, attn_implementation="tikv")
    cache, found, attend = TikvCache(config), [], CacheSlots.attend
    monkeypatch.setattr(CacheSlots, "attend", lambda *args: (found.append(1), attend(*args))[1])
    with torch.no_grad():
        cache.update(numbers(rng, 2, 2, 5, 8), numbers(rng, 2, 2, 5, 8), 0)
        k, v = part(*cache.update(numbers(rng, 2, 2, 1, 8), numbers(rng, 2, 2, 1, 8), 0))
        q = numbers(rng, 2, 4, 1, 8)
        got = by_name.attend(torch.nn.Module(), q, k, v, None)[0]
        want = torch.nn.functional.scaled_dot_product_attention(q, *(a.repeat_interleave(2, 1) for a in (k, v)))
    torch.testing.assert_close(got, want.transpose(1, 2), rtol=1e-4, atol=1e-5)
    assert bool(found) == in_place


def append(cache, rng, tokens=1):
    cache.update(numbers(rng, 2, 2, tokens, 8), numbers(rng, 2, 2, tokens, 8), 0)


CHANGES = {
    "an append": append,
    "appends that make room": lambda cache, rng: append(cache, rng, 300),
    "a crop": lambda cache, rng: cache.crop(-3),
    "a crop and an append": lambda cache, rng: (cache.crop(-3), append(cache, rng)),
    "a reset and an append": lambda cache, rng: (cache.reset(), append(cache, rng)),
    "an order of beams": lambda cache, rng: cache.reorder_cache(torch.tensor([1, 0])),
    "a selection": lambda cache, rng: cache.batch_select_indices(torch.tensor([1])),
    "repeats": lambda cache, rng: cache.batch_repeat_interleave(2),
    "other keys": lambda cache, rng: setattr(cache.layers[0], "keys", numbers(rng, 2, 2, 6, 8)),
    "a compaction": lambda cache, rng: cache.layers[0].compact(np.array([[0, 2], [0, 2]])),
}


@pytest.mark.parametrize(
    ("change", "window"),
    [(change, None) for change in CHANGES]
    + [(change, 4) for change in CHANGES if change[:6] not in ("a comp", "a crop")],
)
def test_later_changes_of_the_cache_do_not_reach_it(arch, rng, change, window, cache, set_room):
    """Neither what was looked at before nor what is looked at afterwards."""
    if window is not None:
        if change in ("a compaction", "a crop and an append"):
            pytest.skip("a window refuses that")
        set_room(rollback=1, spare=1)
        config = transformers.MistralConfig(**BASE, sliding_window=window, attn_implementation="tikv")
        cache = TikvCache(config, dtype="int8")
    (k, v), _ = filled(cache, rng)
    want = [a.clone() for a in cache.layers[0]._read(k.pair.first, k.pair.end)]
    with torch.no_grad():
        CHANGES[change](cache, rng)
    for a, b in zip((k, v), want, strict=True):
        torch.testing.assert_close(a + 0, b, rtol=0, atol=0)
    q = numbers(rng, 2, 4, 1, 8)
    with torch.no_grad():
        got, expected = (by_name.attend(torch.nn.Module(), q, *pair, None)[0] for pair in ((k, v), want))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_streams_keep_what_they_returned(arch, rng, monkeypatch):
    """A token that overwrites the oldest one leaves the keys of the step before as they were."""
    config = transformers.LlamaConfig(**{**BASE, "num_hidden_layers": 1}, attn_implementation="tikv")
    cache = TikvCache(config, dtype="int8", window=6, sinks=2)
    filled(cache, rng)
    for _ in range(5):
        with torch.no_grad():
            k, v = cache.update(numbers(rng, 2, 2, 1, 8), numbers(rng, 2, 2, 1, 8), 0)
            want = [a.clone() for a in cache.layers[0]._read(0, 6)]
            cache.update(numbers(rng, 2, 2, 1, 8), numbers(rng, 2, 2, 1, 8), 0)
        for a, b in zip((k, v), want, strict=True):
            torch.testing.assert_close(a.clone(), b, rtol=0, atol=0)


USES = {
    "product": lambda a: a * 2,
    "in place": lambda a: a.mul_(2) + 0,
    "one number": lambda a: (a.__setitem__((0, 0, 0, 0), 7.0), a + 0)[1],
    "matmul": lambda a: torch.ones(1, 8) @ a.transpose(2, 3),
    "repeat": lambda a: a[:, :, None].expand(2, 2, 3, 6, 8).reshape(2, 6, 6, 8),
    "halves": lambda a: torch.cat(torch.chunk(a, 2, dim=1), dim=-1),
    "attention": lambda a: torch.nn.functional.scaled_dot_product_attention(torch.ones(2, 2, 1, 8), a, a),
    "einsum": lambda a: torch.einsum("bhnd,d->bhn", a, torch.arange(8.0)),
    "rows": lambda a: torch.stack(list(a.unbind(2))),
    "float16": lambda a: a.half(),
    "autocast": lambda a: torch.nn.functional.linear(a, torch.ones(3, 8)),
    "copy": copy.deepcopy,
    "numpy": lambda a: torch.from_numpy(np.asarray(a).copy()),
    "list": lambda a: torch.tensor(a.tolist()),
    "dlpack": lambda a: torch.from_dlpack(a),
    "saved": lambda a: (lambda file: (torch.save(a, file), file.seek(0), torch.load(file))[2])(io.BytesIO()),
    "address": lambda a: torch.tensor([a.data_ptr() != 0, a.untyped_storage().data_ptr() == a.data_ptr()]),
    "text": lambda a: torch.tensor(list(repr(a).encode())),
}


@pytest.mark.parametrize("use", USES)
def test_it_is_a_tensor_for_all_that_torch_does(arch, rng, cache, use):
    (k, v), (keys, values) = filled(cache, rng)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=use == "autocast"):
        for a, b in ((k, keys), (v, values)):
            got, want = USES[use](a), USES[use](b)
            assert type(got) is torch.Tensor
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_compiled_code_takes_it(arch, rng, cache):
    (k, v), (keys, values) = filled(cache, rng)
    torch.compiler.reset()
    compiled = torch.compile(lambda a, b: (a * 2, b.transpose(1, 2)), backend="eager")
    for got, want in zip(compiled(k, v), (keys * 2, values.transpose(1, 2)), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_with_gradients_numbers_are_returned(arch, rng, cache):
    filled(cache, rng)
    assert type(cache.update(numbers(rng, 2, 2, 1, 8), numbers(rng, 2, 2, 1, 8), 0)[0]) is torch.Tensor


def test_it_keeps_no_memory_of_a_cache_that_went(arch, rng, cache):
    """What was used, or followed by another token, has memory of its own."""
    (k, _v), (keys, _) = filled(cache, rng)
    with torch.no_grad():
        torch.testing.assert_close(k + 0, keys, rtol=0, atol=0)
    cache.layers.clear()
    gc.collect()
    assert k.pair.slots() is None
    torch.testing.assert_close(k + 0, keys, rtol=0, atol=0)


def test_a_change_of_attention_reaches_a_cache_that_is_there(arch, rng):
    """Of an encoder-decoder too, of whose configuration the cache reads a copy."""
    config = transformers.BartConfig(
        d_model=32, encoder_attention_heads=2, decoder_attention_heads=2, encoder_layers=1, decoder_layers=1,
        vocab_size=97, attn_implementation="tikv",
    )  # fmt: skip
    cache = TikvCache(config, dtype="int8")
    with torch.no_grad():
        for name, kind in (("tikv", StoredTensor), ("eager", torch.Tensor), ("tikv", StoredTensor)):
            config._attn_implementation = name
            k, _ = cache.update(numbers(rng, 1, 2, 1, 8), numbers(rng, 1, 2, 1, 8), 0)
            assert type(k) is kind
