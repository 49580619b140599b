"""`TikvCache(config, window=, sinks=)`: logits of a model under an explicit mask, in memory for the window alone."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from model_cache import given  # noqa: E402

import tikv  # noqa: E402
from tikv.integrations.transformers import TikvCache  # noqa: E402

pytestmark = [
    pytest.mark.archs("cpu"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_thread"),
]

WINDOW, SINKS = 12, 3
ROOM = {"float16": 2e-3, "int8": 3e-2}  # how far logits of narrower storage may lie


def build(attention="sdpa"):
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, pad_token_id=0, bos_token_id=1,
        eos_token_id=None,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).eval()
    model.set_attn_implementation(attention)
    return model


def sees(tokens, window=WINDOW, sinks=SINKS):
    q, k = torch.arange(tokens)[:, None], torch.arange(tokens)
    return (k <= q) & ((k < sinks) | (k > q - (window - sinks)))


def masked_logits(model, ids, padding=None, **options):
    """What the model says of a whole text under the mask, without a cache."""
    mask = sees(ids.shape[1], **options).expand(len(ids), 1, -1, -1)
    if padding is not None:
        # A row that sees nothing sees itself, so that no NaN comes of it.
        mask = (mask & padding[:, None, None].bool()) | torch.eye(ids.shape[1], dtype=torch.bool)
    positions = None if padding is None else (padding.cumsum(1) - 1).clamp(min=0)
    implementation = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        found = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    model.set_attn_implementation(implementation)
    return found


def fed(model, cache, ids, sizes, padding=None):
    """The logits of a text given to the model in pieces of these sizes."""
    assert sum(sizes) == ids.shape[1]
    return fed_from(model, cache, ids, sizes, padding, 0)


def fed_from(model, cache, ids, sizes, padding, start):
    """The logits of the pieces from token `start` on."""
    found = []
    with torch.no_grad():
        for size in sizes:
            part, end = ids[:, start : start + size], start + size
            seen = {} if padding is None else {"attention_mask": padding[:, :end]}
            if padding is not None:
                seen["position_ids"] = (padding.cumsum(1) - 1).clamp(min=0)[:, start:end]
            found.append(model(part, **given(cache), **seen).logits)
            start = end
    return torch.cat(found, dim=1)


def text(tokens, batch=2):
    torch.manual_seed(1)
    return torch.randint(2, 61, (batch, tokens))


PIECES = {
    "tokens": [1] * 40,
    "to the window": [WINDOW, *[1] * 20],
    "one less": [WINDOW - 1, *[1] * 20],
    "beyond it": [29, *[1] * 25],
    "far beyond it": [100, *[1] * 3, 90, 80, 2, *[1] * 2],
    "fewer than the sinks": [2, *[1] * 30],
    "chunks": [5, 4, 4, 7, 1, 1, 30, 1, 2, 1, 1, 1, 3, 12, 13, 1],
}


@pytest.mark.parametrize("attention", ["sdpa", "tikv", "eager"])
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_logits_are_those_of_the_mask(arch, attention, pieces):
    model, ids = build(attention), text(sum(pieces))
    cache = TikvCache(model.config, window=WINDOW, sinks=SINKS)
    torch.testing.assert_close(fed(model, cache, ids, pieces), masked_logits(model, ids), rtol=0, atol=2e-5)
    assert cache.get_seq_length() == sum(pieces)
    assert [layer.store.capacity for layer in cache.layers] == [WINDOW] * 2


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (2, 1), (WINDOW, 0), (WINDOW, WINDOW - 1), (100, 4)])
def test_windows_and_sinks_of_any_size(arch, window, sinks):
    model, ids = build(), text(44)
    cache = TikvCache(model.config, window=window, sinks=sinks)
    got = fed(model, cache, ids, [20, *[1] * 10, 5, *[1] * 9])
    torch.testing.assert_close(got, masked_logits(model, ids, window=window, sinks=sinks), rtol=0, atol=2e-5)


@pytest.mark.parametrize("attention", ["sdpa", "tikv"])
@pytest.mark.parametrize("dtype", ROOM)
def test_narrower_storage(arch, attention, dtype):
    model, ids = build(attention), text(52)
    cache = TikvCache(model.config, window=WINDOW, sinks=SINKS, dtype=dtype)
    got = fed(model, cache, ids, [20, *[1] * 20, 3, *[1] * 9])
    torch.testing.assert_close(got, masked_logits(model, ids), rtol=0, atol=ROOM[dtype])
    assert cache.layers[0].store.dtype.name == dtype


PADDED = (0, 2, 17)  # tokens of padding before each row's text


def padded(ids):
    padding = torch.ones_like(ids)
    for row, first in enumerate(PADDED):
        padding[row, :first] = 0
    return padding


@pytest.mark.parametrize("attention", ["sdpa", "tikv", "eager"])
@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize("pieces", [[20, *[1] * 15, 6, *[1] * 9], [3, 2, 1, 13, *[1] * 4, 20, *[1] * 7], [1] * 50])
def test_each_row_of_a_padded_batch_is_as_alone(arch, attention, dtype, pieces):
    """The sinks are the first tokens of its own text, and the padding takes no place in its window."""
    model, ids = build(attention), text(50, batch=3)
    cache = TikvCache(model.config, window=WINDOW, sinks=SINKS, dtype=dtype)
    got = fed(model, cache, ids, pieces, padded(ids))
    for row, first in enumerate(PADDED):
        want = masked_logits(model, ids[row : row + 1, first:])
        torch.testing.assert_close(got[row : row + 1, first:], want, rtol=0, atol=ROOM.get(dtype, 2e-5))


def test_what_a_padded_batch_lives_through(arch, tmp_path):
    """Rows that change places, copies, files and wrong tokens."""
    model, ids = build("tikv"), text(60, batch=3)
    padding, cache = padded(ids), TikvCache(model.config, window=WINDOW, sinks=SINKS)

    def goes_on(cache, rows, pieces, start):
        got = fed_from(model, cache, ids[rows], pieces, padding[rows], start)
        for got_row, row in zip(got, rows, strict=True):
            first = PADDED[row]
            want = masked_logits(model, ids[row : row + 1, first:])[0, start - first : start - first + sum(pieces)]
            torch.testing.assert_close(got_row, want, rtol=0, atol=2e-5)

    fed(model, cache, ids[:, :31], [20, *[1] * 11], padding)
    with pytest.raises(tikv.PositionError, match=r"31 to 29 tokens: a window of 12 needs positions from 21 on"):
        cache.crop(-2)
    cache.crop(-1)
    cache.save(tmp_path / "padded.safetensors")
    twin = copy.deepcopy(cache)
    goes_on(TikvCache.load(tmp_path / "padded.safetensors", model.config), [0, 1, 2], [1, 1, 5, 1], 30)
    goes_on(twin, [0, 1, 2], [4, 1, 1], 30)
    cache.reorder_cache(torch.tensor([2, 0, 2]))
    goes_on(cache, [2, 0, 2], [1] * 3, 30)
    cache.batch_repeat_interleave(2)
    goes_on(cache, [2, 2, 0, 0, 2, 2], [1, 4], 33)
    cache.batch_select_indices(torch.tensor([-1, 2]))
    goes_on(cache, [2, 0], [1] * 14, 38)
    with pytest.raises(tikv.OptionError, match=r"keys cannot be set, since the rows begin at positions \[17, 0\]"):
        cache.layers[0].keys = cache.layers[0].keys
    cache.reset()
    torch.testing.assert_close(fed(model, cache, ids, [1] * 60), masked_logits(model, ids), rtol=0, atol=2e-5)


def test_a_mask_that_says_another_beginning_is_refused(arch):
    model, ids = build("tikv"), text(30, batch=3)
    cache = TikvCache(model.config, window=WINDOW, sinks=SINKS)
    fed(model, cache, ids[:, :20], [20], padded(ids))
    with pytest.raises(tikv.PositionError, match=r"row 1 begins at position 0, but its first tokens.* from position 2"):
        fed_from(model, cache, ids, [5], torch.ones_like(ids), 20)
    assert cache.get_seq_length() == 20
    got = fed_from(model, cache, ids, [5, 1], padded(ids), 20)
    for row, first in enumerate(PADDED):
        want = masked_logits(model, ids[row : row + 1, first:26])[0, 20 - first :]
        torch.testing.assert_close(got[row], want, rtol=0, atol=2e-5)


def test_generate_writes_the_text_of_the_mask(arch):
    model, prompt = build("tikv"), text(33)
    cache = TikvCache(model.config, window=WINDOW, sinks=SINKS)
    ids = model.generate(prompt, **given(cache), max_new_tokens=40, do_sample=False)
    want = masked_logits(model, ids)[:, 32:-1].argmax(-1)
    assert torch.equal(ids[:, 33:], want)
    assert cache.nbytes == 2 * 2 * 2 * 2 * WINDOW * 8 * 4  # layers, K and V, batch, heads


@pytest.mark.full
def test_a_compiled_model_leaves_its_graph(arch):
    model, ids = build("tikv"), text(28)
    compiled = torch.compile(model, backend="eager")
    cache = TikvCache(model.config, window=WINDOW, sinks=SINKS)
    got = fed(compiled, cache, ids, [8, 1, 6, 1, 1, 10, 1])
    torch.testing.assert_close(got, masked_logits(model, ids), rtol=0, atol=2e-5)
    torch._dynamo.reset()


def test_beams_copies_and_batches(arch):
    model, ids = build(), text(40, batch=3)
    cache = TikvCache(model.config, window=WINDOW, sinks=SINKS)
    fed(model, cache, ids[:, :30], [16, *[1] * 14])
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    twin = copy.deepcopy(cache)
    cache.batch_select_indices(torch.tensor([1]))
    turned = torch.cat((ids[order, :30], ids[:, 30:]), dim=1)
    want = masked_logits(model, turned)[:, 30:]
    torch.testing.assert_close(fed(model, twin, turned[:, 30:], [1] * 10), want, rtol=0, atol=2e-5)
    torch.testing.assert_close(fed(model, cache, turned[1:2, 30:], [4, *[1] * 6]), want[1:2], rtol=0, atol=2e-5)
    twin.reset()
    torch.testing.assert_close(fed(model, twin, ids, [1] * 40), masked_logits(model, ids), rtol=0, atol=2e-5)


def test_crop_goes_back_as_far_as_the_window_is_whole(arch):
    model, ids = build(), text(40)
    cache = TikvCache(model.config, window=WINDOW, sinks=SINKS)
    fed(model, cache, ids[:, :31], [20, *[1] * 11])
    message = r"cannot go back from 31 to 29 tokens: a window of 12 needs positions from 21.* 22\.\.30"
    with pytest.raises(tikv.PositionError, match=message):
        cache.crop(-2)
    cache.crop(-1)
    want = masked_logits(model, ids)
    torch.testing.assert_close(fed(model, cache, ids[:, 30:], [1] * 10), want[:, 30:], rtol=0, atol=2e-5)
    cache.reset()
    fed(model, cache, ids[:, :20], [20])
    cache.crop(-6)  # a prompt is held whole
    torch.testing.assert_close(fed(model, cache, ids[:, 14:], [3, *[1] * 23]), want[:, 14:], rtol=0, atol=2e-5)


def test_crop_behind_a_long_prompt(arch):
    """Of which a layer keeps what a rollback of 64 tokens needs, once the next layer has its tokens."""
    model, ids = build(), text(150)
    cache = TikvCache(model.config, window=WINDOW, sinks=SINKS)
    fed(model, cache, ids[:, :140], [140])
    assert [layer.store.length for layer in cache.layers] == [WINDOW + 64, 140]
    message = r"cannot go back from 140 to 74 tokens: a window of 12 needs positions from 66.* 67\.\.139"
    with pytest.raises(tikv.PositionError, match=message):
        cache.crop(-66)
    assert [layer.get_seq_length() for layer in cache.layers] == [140] * 2
    cache.crop(-64)
    want = masked_logits(model, ids)
    torch.testing.assert_close(fed(model, cache, ids[:, 76:], [3, *[1] * 5, 66]), want[:, 76:], rtol=0, atol=2e-5)
    with pytest.raises(tikv.PositionError, match="layer 0: cannot go back"):
        cache.crop(-90)


def test_keys_are_what_the_next_token_sees_and_can_be_set(arch):
    model, ids = build(), text(40)
    cache = TikvCache(model.config, window=WINDOW, sinks=SINKS)
    whole = transformers.DynamicCache(config=model.config)
    fed(model, cache, ids[:, :30], [20, *[1] * 10])
    fed(model, whole, ids[:, :30], [30])  # of whose first layer keys depend on the tokens alone
    held = np.r_[:SINKS, 30 - (WINDOW - SINKS) + 1 : 30]
    torch.testing.assert_close(cache.layers[0].keys, whole.layers[0].keys[:, :, held], rtol=0, atol=1e-6)
    want = masked_logits(model, ids)
    for layer in cache.layers:
        keys, values = layer.keys.clone(), layer.values.clone()
        layer.keys, layer.values = keys, values
    assert cache.get_seq_length() == 30
    torch.testing.assert_close(fed(model, cache, ids[:, 30:], [1] * 10), want[:, 30:], rtol=0, atol=2e-5)


def test_layers_that_slide_keep_their_own_window(arch):
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(num_hidden_layers=2, layer_types=kinds, sliding_window=7)
    cache = TikvCache(config, window=WINDOW, sinks=SINKS)
    assert [type(layer).__name__ for layer in cache.layers] == ["SlidingRing", "StreamingLayer"]
    assert "window 12 with 3 sinks" in repr(cache.layers[1])


REFUSED = [
    ({"window": 0}, r"window=0 is not supported\. Use an integer of at least 1"),
    ({"window": 8.5}, r"window=8\.5 is not supported\. Use an integer"),
    ({"window": 8, "sinks": -1}, r"sinks=-1 is not supported\. Use an integer of at least 0"),
    ({"window": 8, "sinks": 8}, r"sinks=8 leave no room for other tokens in window=8\. Use sinks < window"),
    ({"sinks": 4}, r"sinks=4 need a window. Pass window too"),
    ({"window": 8, "max_cache_len": 64}, r"window=8 bounds the memory already\. Leave max_cache_len out"),
]


@pytest.mark.parametrize(("options", "why"), REFUSED)
def test_windows_that_are_none_are_refused(arch, options, why):
    with pytest.raises(tikv.OptionError, match=why):
        TikvCache(build().config, **options)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("T5", {}),
        ("Bloom", {}),
        ("Mpt", {}),
        ("Falcon", {"alibi": True}),
    ],
)
def test_a_bias_by_position_excludes_a_window(arch, family, options):
    """Which such models compute for as many keys as they are given: without a word, other text."""
    config = getattr(transformers, f"{family}Config")(**options)
    with pytest.raises(tikv.OptionError, match="adds to each score a bias that depends on the key's position"):
        TikvCache(config, window=8, sinks=2)
    TikvCache(config, max_cache_len=8)


def test_models_and_attention_that_cannot_are_refused(arch):
    sliding = transformers.MistralConfig(num_hidden_layers=2, sliding_window=7)
    with pytest.raises(tikv.OptionError, match="no layer of this model has full attention"):
        TikvCache(sliding, window=8)
    model = build()
    cache = TikvCache(model.config, window=WINDOW, sinks=SINKS)
    layer, rows = cache.layers[0], torch.zeros(1, 2, 20, 8)
    with pytest.raises(tikv.OptionError, match=r"layer 0: compact\(\) works only on layers without a window"):
        layer.compact([[0]])
    layer.config._attn_implementation = "flash_attention_2"
    with pytest.raises(tikv.OptionError, match="'flash_attention_2' gets no mask that hides keys outside the window"):
        layer.update(rows, rows)
    assert layer.store is None
    layer.update(rows[:, :, :8], rows[:, :, :8])
    with pytest.raises(tikv.OptionError, match="5 new tokens after 8 do not all see each other within window=12"):
        layer.update(rows[:, :, :5], rows[:, :, :5])
    for _ in range(9):
        layer.update(rows[:, :, :1], rows[:, :, :1])
    with pytest.raises(tikv.ShapeError, match="the cache holds 17 tokens"):
        layer.update(rows[:, :1, :1], rows[:, :1, :1])
    assert (layer.get_seq_length(), layer.store.length) == (17, WINDOW)
