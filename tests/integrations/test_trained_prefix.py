"""`TikvCache(config, grad=True)` in a training step: a prefix of keys and values learns as in a `DynamicCache`."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import tiny_models  # noqa: E402
from model_cache import BASE, given  # noqa: E402
from transformers import DynamicCache  # noqa: E402

import tikv  # noqa: E402
from tikv.integrations.transformers import TikvCache  # noqa: E402
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


def model_of(name, attention="tikv"):
    config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config(**BASE, **FAMILIES[name], initializer_range=0.3)).eval()
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
