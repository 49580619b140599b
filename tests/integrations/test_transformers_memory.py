"""What a prompt needs at its peak: the cache as it is stored, and one layer's keys and values beside it."""

import gc
import weakref

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from launch_counter import refuse_plans  # noqa: E402
from model_cache import BASE, given  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import tikv  # noqa: E402
from tikv import runtime  # noqa: E402
from tikv.arrays import memory  # noqa: E402
from tikv.integrations.transformers import TikvCache  # noqa: E402
from tikv.integrations.transformers.layers import room as rooms  # noqa: E402

pytestmark = [
    pytest.mark.archs("cpu"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_thread"),
]

LAYERS, TOKENS, WINDOW = 6, 3000, 40
ROW = 2 * BASE["num_key_value_heads"] * BASE["head_dim"]  # numbers of a token in a layer, of keys and of values
ONE_LAYER = TOKENS * ROW * 4  # bytes of a prompt's keys and values


class PeakBytes(TorchDispatchMode):
    """The most bytes that torch's tensors and this library's memory have together, since `start`."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.tensors, self.blocks, self.most = {}, weakref.WeakSet(), 0
        init = memory.Memory.__init__

        def made(block, *args):
            init(block, *args)
            self.blocks.add(block)
            self.look()

        monkeypatch.setattr(memory.Memory, "__init__", made)

    def ours(self):
        return sum(block.nbytes for block in self.blocks)

    def look(self):
        self.tensors = {key: found for key, found in self.tensors.items() if not found[0].expired()}
        self.most = max(self.most, self.ours() + sum(nbytes for _, nbytes in self.tensors.values()))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        starts = [(block.ptr, block.ptr + block.nbytes) for block in self.blocks]
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and not any(a <= tensor.data_ptr() < b for a, b in starts):
                storage = tensor.untyped_storage()
                self.tensors[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.look()
        return found


def build(attention, **sliding):
    torch.manual_seed(0)
    config = {**BASE, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    family = (transformers.MistralForCausalLM, transformers.MistralConfig)
    if not sliding:
        family = (transformers.LlamaForCausalLM, transformers.LlamaConfig)
    model = family[0](family[1](**{**config, "max_position_embeddings": 2 * TOKENS, **sliding})).eval()
    model.set_attn_implementation(attention)
    return model


def peak_of_a_prompt(model, cache, monkeypatch):
    ids = torch.arange(TOKENS)[None] % 90 + 2
    gc.collect()
    with monkeypatch.context() as patched, torch.no_grad(), PeakBytes(patched) as peak:
        model(ids, **given(cache), use_cache=True, logits_to_keep=1)
    return peak.most


def bytes_of(cache):
    if isinstance(cache, TikvCache):
        return cache.nbytes
    return sum(a.untyped_storage().nbytes() for layer in cache.layers for a in (layer.keys, layer.values))


CACHES = {
    "growing": ({}, 1),
    "growing, int8": ({"dtype": "int8"}, 10 / 32),  # of 8 numbers and their scale
    "of a length": ({"max_cache_len": TOKENS + 9}, 1),
    "of a length, int8": ({"max_cache_len": TOKENS + 9, "dtype": "int8"}, 10 / 32),
    "of a length, float16": ({"max_cache_len": TOKENS + 9, "dtype": "float16"}, 1 / 2),
    "int8 of a bfloat16 model": ({"dtype": "int8"}, 10 / 16),
}


@pytest.mark.parametrize("attention", ["sdpa", "tikv"])
@pytest.mark.parametrize("case", CACHES)
def test_a_prompt_needs_what_is_stored_and_one_layer(arch, attention, case, monkeypatch):
    """Beside what the model itself needs, which is what it has with transformers' own cache above that cache."""
    (options, share), dtype = CACHES[case], torch.bfloat16 if "bfloat16 model" in case else torch.float32
    model, one_layer = build("sdpa").to(dtype), TOKENS * ROW * dtype.itemsize
    own = transformers.DynamicCache(config=model.config)
    activations = peak_of_a_prompt(model, own, monkeypatch) - bytes_of(own)
    assert bytes_of(own) == LAYERS * one_layer
    model.set_attn_implementation(attention)
    cache = TikvCache(model.config, **options)
    peak = peak_of_a_prompt(model, cache, monkeypatch)
    assert peak > cache.nbytes >= share * bytes_of(own)
    assert cache.nbytes <= 1.2 * share * bytes_of(own), "growing takes an eighth more"
    assert peak - cache.nbytes <= activations + one_layer


WINDOWS = {
    "streamed": ({}, {"window": WINDOW, "sinks": 4}, WINDOW + rooms.ROLLBACK, 4),
    "streamed, int8": ({}, {"window": WINDOW, "sinks": 4, "dtype": "int8"}, WINDOW + rooms.ROLLBACK, 10 / 8),
    "sliding": ({"sliding_window": WINDOW}, {}, WINDOW + rooms.ROLLBACK + rooms.SPARE, 4),
    "sliding, int8": ({"sliding_window": WINDOW}, {"dtype": "int8"}, WINDOW + rooms.ROLLBACK + rooms.SPARE, 10 / 8),
}


@pytest.mark.parametrize(("sliding", "options", "slots", "number"), WINDOWS.values(), ids=WINDOWS)
def test_a_prompt_longer_than_the_window_is_held_by_one_layer(arch, sliding, options, slots, number, monkeypatch):
    """`slots`: that every other layer has; `number`: bytes of one, with its share of a scale."""
    model = build("tikv", **sliding)
    cache = TikvCache(model.config, **options)
    ids = torch.arange(TOKENS)[None] % 90 + 2
    with monkeypatch.context() as patched, torch.no_grad():
        peak, most = PeakBytes(patched), []
        look = peak.look
        peak.look = lambda: (most.append(peak.ours()), look())
        model(ids, **given(cache), use_cache=True, logits_to_keep=1)
        held = (LAYERS * slots + TOKENS + slots) * ROW * number
        decoded = 0 if "dtype" not in options else ONE_LAYER
        assert max(most) <= held + decoded + 4096
        assert peak.ours() <= held + 4096
        model(ids[:, :1], **given(cache), use_cache=True)
    assert cache.nbytes <= LAYERS * slots * ROW * number


@pytest.mark.parametrize("options", [{}, {"dtype": "int8"}, {"max_cache_len": TOKENS}, {"window": WINDOW}])
@pytest.mark.parametrize("attention", ["sdpa", "tikv"])
def test_no_layer_keeps_a_prompt_that_it_was_given(arch, attention, options):
    """When the next layer's tokens come, the tensors before are gone: what was given, and what copies came back."""
    model, before, seen = build(attention), [], []

    class Watched(TikvCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            assert all(storage.expired() for storage in before)
            seen.append(layer_idx)
            found = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            own = [layer.store.keys.numpy().ctypes.data for layer in self.layers if layer.store is not None]
            copies = [a for a in found if a.data_ptr() not in own and "dtype" in options]
            before[:] = [StorageWeakRef(a.untyped_storage()) for a in (key_states, value_states, *copies)]
            return found

    cache = Watched(model.config, **options)
    with torch.no_grad():
        model(torch.arange(200)[None] % 90 + 2, **given(cache), use_cache=True)
    assert seen == list(range(LAYERS))
    assert all(storage.expired() for storage in before)


def test_growing_holds_one_layer_twice_at_most(arch, monkeypatch):
    """And then for as long as it is copied."""
    cache = TikvCache(build("sdpa").config)
    rows = torch.zeros(1, BASE["num_key_value_heads"], 300, BASE["head_dim"])
    with monkeypatch.context() as patched, torch.no_grad():
        peak, sizes = PeakBytes(patched), []
        for _ in range(8):
            for i in range(LAYERS):
                cache.update(rows, rows, i)
            sizes.append(cache.nbytes)
        assert len(set(sizes)) > 3
        assert peak.ours() == cache.nbytes
        assert peak.most <= cache.nbytes * (1 + 1 / LAYERS)


def test_what_update_returned_stays_when_the_prompt_goes(arch, rng):
    """As for layers that share keys of another: the memory goes with the last that reads it."""
    model = build("sdpa")
    cache = TikvCache(model.config, window=WINDOW, sinks=4)
    shape = 1, BASE["num_key_value_heads"], 300, BASE["head_dim"]
    k, v = (torch.from_numpy(rng.standard_normal(shape, dtype="float32")) for _ in "kv")
    with torch.no_grad():
        found = cache.update(k, v, 0)
        for layer in range(1, len(cache.layers)):
            cache.update(k, v, layer)
        for _ in range(2 * WINDOW):
            for layer in range(len(cache.layers)):
                cache.update(k[:, :, :1], v[:, :, :1], layer)
    assert torch.equal(found[0], k)
    assert torch.equal(found[1], v)


@pytest.mark.parametrize(
    "options",
    [{"max_cache_len": 99}, {"max_cache_len": 99, "dtype": "int8"}, {"window": 16, "sinks": 4}, {}],
    ids=["fixed", "int8", "window", "growing"],
)
def test_a_prompt_in_a_new_cache_binds_nothing_that_an_older_cache_has_bound(arch, rng, monkeypatch, options):
    """Launches are shared by layers of one form: each layer has its own rows, and a form that comes again its plan."""
    config, shape = build("sdpa").config, (1, BASE["num_key_value_heads"], 33, BASE["head_dim"])
    rows = torch.from_numpy(rng.standard_normal((config.num_hidden_layers, 4, *shape), dtype="float32"))

    def update(cache, chunk):
        with torch.no_grad():
            pairs = [cache.update(*rows[i, 2 * chunk : 2 * chunk + 2], i) for i in range(config.num_hidden_layers)]
        return [(k.clone(), v.clone()) for k, v in pairs]

    def expect(pairs, chunks):
        for i, pair in enumerate(pairs):
            for which, found in enumerate(pair):
                wanted = torch.cat([rows[i, 2 * chunk + which] for chunk in range(chunks)], 2)
                torch.testing.assert_close(found, wanted, rtol=0, atol=0.03 if "dtype" in options else 0)

    expect(update(TikvCache(config, **options), 0), 1)
    cache = TikvCache(config, **options)
    with monkeypatch.context() as patch:
        refuse_plans(patch)
        expect(update(cache, 0), 1)
    if "window" not in options:
        expect(update(cache, 1), 2)
        cache.crop(-33)
        expect(update(cache, 1), 2)
        cache.reset()
        expect(update(cache, 0), 1)


@pytest.mark.parametrize("dtype", [None, "int8", "float8_e4m3fn"])
def test_more_tokens_than_the_memory_has_room_for_are_refused_when_the_cache_is_made(arch, dtype):
    limit = runtime.memory_bytes("cpu")
    config = transformers.LlamaConfig(**BASE | {"num_hidden_layers": 64})
    with pytest.raises(tikv.CapacityError, match=rf"^TikvCache: 64 layers .* {limit} bytes of memory in all"):
        TikvCache(config, max_cache_len=limit // 64, dtype=dtype)
    assert TikvCache(config, max_cache_len=limit // 2**14, dtype=dtype).nbytes == 0


def test_more_sequences_than_the_memory_has_room_for_are_refused_before_memory_is_allocated(arch, monkeypatch):
    config = transformers.LlamaConfig(**BASE | {"num_hidden_layers": 64})
    monkeypatch.setattr(runtime, "memory_bytes", lambda *_: 10_000_000)
    cache = TikvCache(config, max_cache_len=300)  # a sequence takes 2.5 MB in float32
    states = torch.zeros(5, 2, 1, 8)
    for allocate in (
        lambda: cache.update(states, states, 0),
        lambda: cache.early_initialization(5, 2, 8, torch.float32, torch.device("cpu")),
    ):
        with pytest.raises(tikv.CapacityError, match=r"64 layers for 5 sequences of .* need 12288000 bytes"):
            allocate()
        assert cache.nbytes == 0
    cache.update(states[:4], states[:4], 0)
    cache.update(states[:4], states[:4], 1)
    assert cache.get_seq_length() == 1
