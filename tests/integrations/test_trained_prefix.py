"""`TikvCache(config, grad=True)` in a training step: a prefix of keys and values learns as in a `DynamicCache`."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import tiny_models  # noqa: E402
from allocations import measure  # noqa: E402
from model_cache import BASE, given  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from transformers import DynamicCache  # noqa: E402
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask  # noqa: E402

import tikv  # noqa: E402
from tikv.integrations.transformers import TikvCache  # noqa: E402
from tikv.integrations.transformers.attention.attend import attend  # noqa: E402
from tikv.integrations.transformers.versions.installed import VERSION  # noqa: E402

pytestmark = [
    pytest.mark.archs("cpu"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_thread"),
]
if VERSION < (5, 19):
    pytest.skip("`crop` and the layers of newer versions of transformers", allow_module_level=True)

PREFIX, WINDOW = 5, 6
FAMILIES = {
    "Llama": {},
    "Gemma3": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "Qwen3": {},
}


def model_of(name, attention="tikv", **options):
    config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
    torch.manual_seed(0)
    sizes = {**BASE, **FAMILIES.get(name, {}), "initializer_range": 0.3, **options}
    model = getattr(transformers, f"{name}ForCausalLM")(config(**sizes)).eval()
    model.set_attn_implementation(attention)
    return model.requires_grad_(False)


def tokens(rows, count, seed=1):
    return torch.randint(2, 97, (rows, count), generator=torch.Generator().manual_seed(seed))


def prefix(rows=2):
    """Keys and values for each of the four layers, which require a gradient."""
    numbers = torch.Generator().manual_seed(3)
    return [
        tuple(torch.randn(rows, 2, PREFIX, 8, generator=numbers).mul(0.3).requires_grad_() for _ in "kv")
        for _ in range(4)
    ]


def loss_of(model, cache, learned, ids):
    """Cross entropy of a text after a prefix of keys and values, as PEFT's prefix tuning passes one."""
    for i, (k, v) in enumerate(learned):
        cache.update(k, v, i)
    logits = model(ids[:, :-1], **given(cache)).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def all_of(learned):
    return [a for pair in learned for a in pair]


@pytest.mark.parametrize("attention", ["tikv", "eager", "sdpa"])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_transformers_own_cache(arch, name, attention):
    model, ids = model_of(name, attention), tokens(2, 12)
    found = []
    for make in (lambda: TikvCache(model.config, grad=True), lambda: DynamicCache(config=model.config)):
        learned = prefix()
        loss = loss_of(model, make(), learned, ids)
        loss.backward()
        found.append([loss.detach(), *(a.grad for a in all_of(learned))])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))


HYBRID = FAMILIES["Gemma3"]
BITS = {
    "Llama": ("Llama", {}, {}),
    "odd rows": ("Llama", {"head_dim": 6, "num_key_value_heads": 4}, {}),
    "limit": ("Llama", {}, {"max_cache_len": 40}),
    "float16": ("Llama", {}, {"dtype": "float16"}),
    "bfloat16": ("Llama", {}, {"dtype": "bfloat16"}),
    "sliding": ("Gemma3", HYBRID, {}),
    "soft cap": ("Gemma2", {**HYBRID, "attn_logit_softcapping": 3.0}, {}),
    "sink logits": ("GptOss", {**HYBRID, "num_local_experts": 2, "num_experts_per_tok": 1}, {}),
}


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("case", BITS)
def test_the_forward_pass_has_the_bits_of_one_without_gradients(arch, case, padded):
    """A prompt after the prefix, pieces of it and single tokens: the logits of a cache that passes no gradients on."""
    family, options, of_cache = BITS[case]
    model = model_of(family, **options)
    heads, width = model.config.num_key_value_heads, model.config.head_dim
    numbers, ids = torch.Generator().manual_seed(3), tokens(2, 12)
    learned = [[torch.randn(2, heads, PREFIX, width, generator=numbers).mul(0.3) for _ in "kv"] for _ in range(4)]
    seen = torch.ones(2, PREFIX + 12, dtype=torch.long)
    if padded:
        seen[0, PREFIX : PREFIX + 3] = 0

    def logits(cache, parts):
        for i, pair in enumerate(learned):
            cache.update(*pair, i)
        ends = [PREFIX + sum(parts[: i + 1]) for i in range(len(parts))]
        steps = zip(ids.split(parts, 1), ends, strict=True)
        return torch.cat([model(x, **given(cache), attention_mask=seen[:, :end]).logits for x, end in steps], 1)

    for parts in ([12], [7, 1, 4], [1] * 12):
        with torch.no_grad():
            want = logits(TikvCache(model.config, **of_cache), parts)
        all_of(learned)[0].requires_grad_()
        got = logits(TikvCache(model.config, grad=True, **of_cache), parts)
        assert got.requires_grad
        assert torch.equal(got.detach(), want)


def attention_of(options, window=None):
    """(an attention module, an empty cache of one layer, the function that makes its masks)."""
    sizes = {**BASE, "num_hidden_layers": 1, **options}
    sizes |= {} if window is None else {"sliding_window": window}
    kind = "Llama" if window is None else "Mistral"
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}Model")(config)
    model.set_attn_implementation("tikv")
    make = create_causal_mask if window is None else create_sliding_window_causal_mask
    cache = TikvCache(config, grad=True)

    def mask(rows, count, seen=None):
        inputs = torch.zeros(rows, count, config.hidden_size)
        return make(config=config, inputs_embeds=inputs, attention_mask=seen, position_ids=None, **given(cache))

    return model.layers[0].self_attn, cache, mask


def grown(rows, heads, count, width, seed):
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(rows, heads, count, width, generator=numbers).requires_grad_()


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"s_aux": torch.tensor([0.5, -1.0, 0.0, 2.0])}], ids=str)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("count", [1, 6])
def test_gradients_are_those_of_float64(arch, count, window, options, padded):
    """Of queries, new tokens, a prefix and the logits of sinks; tokens between are frozen."""
    module, cache, make_mask = attention_of({}, window)
    options = {name: a.clone().requires_grad_() if name == "s_aux" else a for name, a in options.items()}
    first, frozen = [[grown(2, 2, n, 8, seed + i) for i in range(2)] for n, seed in ((3, 1), (5, 3))]
    q, *new = (grown(2, heads, count, 8, 5 + heads + i) for i, heads in enumerate((4, 2, 2)))
    held = 8 + count
    seen = torch.ones(2, held, dtype=torch.long)
    seen[0, 3:5] = not padded
    cache.update(*first, 0)
    with torch.no_grad():
        cache.update(*frozen, 0)
    mask = make_mask(2, count, seen)
    out = attend(module, q, *cache.update(*new, 0), mask, scaling=0.4, **options)[0]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    trained = [q, *new, *first, *(a for name, a in options.items() if name == "s_aux")]
    got = torch.autograd.grad((out * weights).sum(), trained)

    k, v = (torch.cat(parts, 2).double().repeat_interleave(2, 1) for parts in zip(first, frozen, new, strict=True))
    scores = q.double() @ k.mT * 0.4
    if "softcap" in options:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    ahead = torch.arange(held) - torch.arange(held - count, held)[:, None]
    visible = (ahead <= 0) & (ahead > -(window or held)) & seen.bool()[:, None, None]
    scores = scores.masked_fill(~visible, -torch.inf)
    if "s_aux" in options:
        scores = torch.cat((scores, options["s_aux"].double()[None, :, None, None].expand(2, 4, count, 1)), -1)
    exact = (torch.softmax(scores, -1)[..., :held] @ v).transpose(1, 2)
    for a, b in zip(got, torch.autograd.grad((exact * weights).sum(), trained), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * max(float(b.abs().max()), 0.01))


LONG = pytest.param(32768, 512, 0, False, marks=pytest.mark.thorough, id="long")
SIZES = [(4096, 256, prefix_of, padded) for prefix_of in (0, 64, 4096) for padded in (False, True)]


@pytest.mark.parametrize(("held", "count", "prefix_of", "padded"), [*SIZES, LONG])
def test_memory_of_a_step_is_that_of_its_forward_pass_and_twice_the_gradients(arch, held, count, prefix_of, padded):
    """No matrix of scores is kept or made, and frozen tokens have no gradients."""
    module, cache, make_mask = attention_of({"num_attention_heads": 8, "head_dim": 64, "hidden_size": 512})
    trained = [grown(1, 2, prefix_of, 64, seed) for seed in (1, 2)]
    if prefix_of:
        cache.update(*trained, 0)
    if prefix_of < held:
        with torch.no_grad():
            cache.update(*(grown(1, 2, held - prefix_of, 64, seed) for seed in (3, 4)), 0)
    trained += [grown(1, heads, count, 64, 5 + i) for i, heads in enumerate((2, 2, 8))]
    seen = torch.ones(1, held + count, dtype=torch.long)
    seen[:, held : held + 3] = not padded

    def step():
        mask = make_mask(1, count, seen)
        return attend(module, trained[-1], *cache.update(*trained[-3:-1], 0), mask)[0]

    forward = measure(step)
    ahead = torch.ones_like(forward.result)
    trained = [a for a in trained if a.numel()]
    gradients = measure(lambda: torch.autograd.grad(forward.result, trained, ahead))
    of_rows = 2 * 2 * (held + count) * 64 * 4  # the copy of keys and values
    of_trained = sum(a.nbytes for a in trained)
    sizes = [f"{size / 1e6:.1f} MB" for size in (gradients.peak, of_trained)]
    print(f"\n{count} after {held}: beside the forward pass {sizes[0]}, gradients {sizes[1]}")
    assert forward.kept <= of_rows + 4 * forward.result.nbytes
    assert gradients.peak <= 2 * of_trained


def test_what_nobody_asks_for_is_not_computed(arch):
    """Frozen queries over a trained prefix and many frozen tokens: of these, the scores are computed, and no more."""
    module, cache, make_mask = attention_of({"num_attention_heads": 8, "head_dim": 64, "hidden_size": 512})
    learned = [grown(1, 2, 4, 64, seed) for seed in (1, 2)]
    cache.update(*learned, 0)
    with torch.no_grad():
        cache.update(*(grown(1, 2, 2000, 64, seed) for seed in (3, 4)), 0)
    q, *new = (grown(1, heads, 64, 64, 5 + i).detach() for i, heads in enumerate((8, 2, 2)))
    a_product = 2 * 8 * 64 * 2068 * 64  # operations of queries times keys
    for sources in (learned, learned[1:]):
        mask = make_mask(1, 64)
        out = attend(module, q, *cache.update(*new, 0), mask)[0]
        cache.crop(-64)
        with FlopCounterMode(display=False) as counter:
            got = torch.autograd.grad(out.sum(), sources)
        assert all(a.abs().max() > 0 for a in got)
        assert counter.get_total_flops() < 1.5 * a_product


def test_keys_that_a_model_changed_keep_their_gradients(arch):
    """Attention is then torch's, and follows what was done to them."""
    module, cache, make_mask = attention_of({})
    learned, new = [grown(2, 2, 4, 8, seed) for seed in (1, 2)], [grown(2, h, 3, 8, 7).detach() for h in (4, 2, 2)]
    cache.update(*learned, 0)
    mask = make_mask(2, 3)
    keys, values = cache.update(*new[1:], 0)
    factor = torch.tensor(2.0, requires_grad=True)
    keys.mul_(factor)
    attend(module, new[0], keys, values, mask)[0].square().sum().backward()
    assert factor.grad.abs() > 0
    assert learned[0].grad.abs().max() > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prefix_learns(arch, name):
    """The loss falls as with transformers' own cache; one cache serves all steps."""
    model, ids = model_of(name), tokens(2, 12)
    losses = {}
    for kind in ("ours", "theirs"):
        learned, cache = prefix(), TikvCache(model.config, grad=True)
        optimizer = torch.optim.SGD(all_of(learned), lr=0.05)
        losses[kind] = []
        for _ in range(12):
            cache.reset()
            loss = loss_of(model, cache if kind == "ours" else DynamicCache(config=model.config), learned, ids)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[kind].append(float(loss.detach()))
    assert losses["ours"][-1] < losses["ours"][0] - 0.02
    torch.testing.assert_close(losses["ours"], losses["theirs"], rtol=1e-3, atol=0)


def test_weights_that_are_trained_get_gradients_through_the_cache(arch):
    """Several calls in one step: tokens of the first are read by the second."""
    ids, found = tokens(2, 12), []
    for kind in ("ours", "theirs", "whole"):
        model = model_of("Llama").requires_grad_()
        if kind == "whole":
            logits = model(ids, use_cache=False).logits
        else:
            cache = TikvCache(model.config, grad=True) if kind == "ours" else DynamicCache(config=model.config)
            logits = torch.cat([model(part, **given(cache)).logits for part in ids.split([7, 1, 4], 1)], 1)
        logits.square().mean().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, want in found[2].items():
        for other in found[:2]:
            torch.testing.assert_close(other[name], want, rtol=0, atol=2e-5 * float(want.abs().max()), msg=name)


CHANGES = {
    "crop": lambda cache: cache.crop(-2),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1, -2])),
    "repeat": lambda cache: (cache.batch_repeat_interleave(2), cache.batch_select_indices(torch.tensor([0, 3]))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_follow_tokens(arch, change):
    model, ids = model_of("Llama"), tokens(2, 6)
    found = []
    for make in (lambda: TikvCache(model.config, grad=True), lambda: DynamicCache(config=model.config)):
        learned, cache = prefix(), make()
        for i, (k, v) in enumerate(learned):
            cache.update(k, v, i)
        model(ids, **given(cache))
        CHANGES[change](cache)
        model(ids, **given(cache)).logits.square().sum().backward()
        found.append([a.grad for a in all_of(learned)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))


def test_gradients_follow_copies_and_snapshots(arch):
    model, ids = model_of("Llama"), tokens(2, 6)
    learned, cache = prefix(), TikvCache(model.config, grad=True)
    for i, (k, v) in enumerate(learned):
        cache.update(k, v, i)
    want = torch.autograd.grad(model(ids, **given(copy.deepcopy(cache))).logits.square().sum(), all_of(learned))
    snapshot = cache.snapshot()
    for change in (lambda: model(ids, **given(cache)), lambda: cache.reset(), lambda: cache.crop(-2)):
        change()
        if not cache.get_seq_length():
            with torch.no_grad():
                model(ids, **given(cache))
        cache.restore(snapshot)
        got = torch.autograd.grad(model(ids, **given(cache)).logits.square().sum(), all_of(learned), retain_graph=True)
        cache.restore(snapshot)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_what_gets_no_gradient(arch):
    """Tokens that came without one, or under no_grad, and rows that a program has set."""
    model, ids = model_of("Llama"), tokens(2, 6)
    learned, cache = prefix(), TikvCache(model.config, grad=True)
    for i, (k, v) in enumerate(learned):
        with torch.no_grad():
            cache.update(k, v, i)
    assert not model(ids, **given(cache)).logits.requires_grad
    with torch.no_grad():
        text = model.generate(ids, **given(TikvCache(model.config, grad=True)), max_new_tokens=4, do_sample=False)
    assert text.shape == (2, 10)


def test_a_prefix_of_a_hybrid_learns(arch):
    if "qwen3_next" not in tiny_models.folders():
        pytest.skip("this transformers has no qwen3_next")
    model = tiny_models.tiny_model(tiny_models.generators("qwen3_next")[0]).requires_grad_(False)
    low, high = tiny_models.ORDINARY.start, tiny_models.ORDINARY.stop
    ids = torch.randint(low, high, (2, 8), generator=torch.Generator().manual_seed(1))
    found = []
    for make in (lambda: TikvCache(model.config, grad=True), lambda: DynamicCache(config=model.config)):
        cache = make()
        layer = next(i for i, each in enumerate(cache.layers) if hasattr(each, "get_seq_length"))
        shape = (2, model.config.num_key_value_heads, PREFIX, model.config.head_dim)
        learned = [torch.full(shape, value).requires_grad_() for value in (0.1, 0.2)]
        cache.update(*learned, layer)
        mask = torch.ones(2, PREFIX + 8, dtype=torch.long)
        model(ids, **given(cache), attention_mask=mask).logits.square().sum().backward()
        found.append([a.grad for a in learned])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dtype": "int8"}, "codes have no gradient"),
        ({"dtype": "float8_e4m3fn"}, "codes have no gradient"),
        ({"window": 8, "sinks": 2}, "StreamingLayer, which passes no gradients on"),
        ({"place": "host"}, "passes no gradients on"),
        ({"grad": 1}, "pass True or False"),
    ],
)
def test_what_passes_no_gradients_on_is_refused(arch, options, why):
    with pytest.raises(tikv.OptionError, match=rf"grad=.* is not possible: .*{why}"):
        TikvCache(transformers.LlamaConfig(**BASE), **{"grad": True, **options})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_stored_rows_may_be_narrower(arch, dtype):
    """The numbers are rounded, and the gradient is that of the rounded ones."""
    model, ids = model_of("Llama"), tokens(2, 6)
    learned = prefix()
    loss_of(model, TikvCache(model.config, dtype=dtype, grad=True), learned, ids).backward()
    plain = prefix()
    loss_of(model, TikvCache(model.config, grad=True), plain, ids).backward()
    for got, want in zip(all_of(learned), all_of(plain), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=0, atol=0.05 * float(want.grad.abs().max()))
