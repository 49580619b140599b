"""The pages of transformers' continuous batching in other formats: `tikv.integrations.transformers.pages`."""

import copy
import functools
import gc

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from lives import families  # noqa: E402

import tikv  # noqa: E402
from tikv.integrations.transformers import TikvCache, pages  # noqa: E402
from tikv.integrations.transformers.batching import managers as batching  # noqa: E402
from tikv.integrations.transformers.batching import page_memory  # noqa: E402
from tikv.integrations.transformers.versions.installed import VERSION  # noqa: E402

pytestmark = [pytest.mark.archs("cpu"), pytest.mark.usefixtures("one_thread")]
if VERSION < batching.FIRST:
    pytest.skip("this version's continuous batching is refused", allow_module_level=True)

from transformers.generation.configuration_utils import ContinuousBatchingConfig  # noqa: E402
from transformers.generation.continuous_batching import cache as their_cache  # noqa: E402
from transformers.generation.continuous_batching import continuous_api, offloading_manager  # noqa: E402

LENGTHS = (3, 1, 19, 2, 25)  # longer and shorter than windows of 7, pages of 4 and batches of 16
MODELS = {"full": ("Llama", {}), "ring": ("Mistral", {"sliding_window": 7}), "both": ("Gemma2", {"sliding_window": 7})}
FORMATS = {
    "int8": {"dtype": "int8"},
    "e4m3": {"dtype": "float8_e4m3fn", "k_scale": 0.5, "v_scale": [0.25]},
    "q4_0": {"dtype": "q4_0"},
    "four_bits": {"dtype": tikv.Quant(bits=4)},
    "rotated": {"dtype": tikv.Quant(bits=4, rotate="hadamard")},
    "mxfp8": {"dtype": "mxfp8"},
    "nvfp4": {"dtype": "nvfp4", "k_scale": 0.01},
    "different": {"dtype": "int8", "v_dtype": "q4_0"},
    "values": {"v_dtype": "int8"},
}


@functools.cache
def model_of(kind, arch="cpu"):
    if arch != "cpu":
        return copy.deepcopy(model_of(kind)).to(arch)
    start, options = MODELS[kind]
    widths = {"hidden_size": 64, "head_dim": 64}
    config = getattr(transformers, f"{start}Config")(**{**families.COMMON, **widths, **options})
    torch.manual_seed(0)
    return getattr(transformers, f"{start}ForCausalLM")(config).eval()


@functools.cache
def prompts():
    torch.manual_seed(1)
    return tuple(tuple(torch.randint(3, 60, (n,)).tolist()) for n in LENGTHS)


def greedy(**options):
    return transformers.GenerationConfig(
        **{"max_new_tokens": 9, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0, **options}
    )


def one_by_one(kind, form, arch="cpu"):
    """The texts of `generate` with a `TikvCache` of this format."""
    model, texts = model_of(kind, arch), []
    model.set_attn_implementation("tikv")
    argument = "cache" if VERSION >= (5, 24) else "past_key_values"
    for prompt in prompts():
        cached = {argument: TikvCache(model.config, **form)}
        made = model.generate(torch.tensor([prompt], device=arch), generation_config=greedy(), **cached)
        texts.append(made[0, len(prompt) :].tolist())
    return texts


def batched(kind, inputs=None, generation=None, arch="cpu", **options):
    """The texts of `generate_batch`, in the order of the prompts."""
    model = model_of(kind, arch)
    model.set_attn_implementation("tikv")
    room = {"page_size": 4, "num_blocks": 64, "max_batch_tokens": 16, **options}
    results = model.generate_batch(
        [list(p) for p in (prompts() if inputs is None else inputs)],
        generation_config=generation or greedy(),
        continuous_batching_config=ContinuousBatchingConfig(**room),
    )
    assert model.config._attn_implementation == "tikv"
    errors = [result.error for result in results.values() if result.error]
    assert not errors, errors
    return [result.generated_tokens for result in results.values()]


@pytest.mark.full(unless=lambda case: case["name"] in ("int8", "four_bits", "different"))
@pytest.mark.parametrize("name", FORMATS)
def test_texts_are_those_of_a_cache_of_the_format(arch, name):
    want = one_by_one("full", FORMATS[name])
    with pages(**FORMATS[name]):
        assert batched("full") == want


@pytest.mark.archs("cuda")
@pytest.mark.full
@pytest.mark.parametrize("name", FORMATS)
def test_texts_on_a_gpu(arch, name):
    want = one_by_one("full", FORMATS[name], arch)
    with pages(**FORMATS[name]):
        assert batched("full", arch=arch, use_cuda_graph=True, use_async_batching=True) == want


@pytest.mark.full(unless=lambda case: (case["kind"], case["name"]) == ("both", "int8"))
@pytest.mark.parametrize("kind", ["ring", "both"])
@pytest.mark.parametrize("name", ["int8", "four_bits"])
def test_sliding_layers(arch, kind, name):
    """Chunks of prompts overwrite codes that they still see."""
    want = one_by_one(kind, FORMATS[name])
    with pages(**FORMATS[name]):
        assert batched(kind) == want


@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.full), "ring"])
def test_the_code_for_devices(arch, kind, as_on_a_device):
    want = one_by_one(kind, FORMATS["int8"])
    as_on_a_device()
    with pages(dtype="int8"):
        assert batched(kind) == want
        assert batched(kind, max_batch_tokens=64, max_blocks_per_request=0) == want


@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.full), "both"])
def test_forks_copy_codes_and_scales(arch, kind):
    want = one_by_one(kind, FORMATS["int8"])[2]
    sampled = greedy(do_sample=True, top_k=1, num_return_sequences=3)
    with pages(dtype="int8"):
        assert batched(kind, [prompts()[2]], sampled, max_batch_tokens=64) == [want] * 3


@pytest.mark.full(unless=lambda case: (case["kind"] == "both") == bool(case["form"]))
@pytest.mark.parametrize("kind", ["full", "both"])
@pytest.mark.parametrize("form", [{}, {"dtype": "int8"}], ids=["plain", "int8"])
def test_requests_leave_the_device_and_come_back(arch, kind, form, monkeypatch):
    want, away = one_by_one(kind, form), []
    original, empty = offloading_manager.OffloadingManager._offload_to_cpu, torch.empty

    def offload(self, *args, **kwargs):
        away.extend(original(self, *args, **kwargs))
        return set(away)

    monkeypatch.setattr(offloading_manager.OffloadingManager, "_offload_to_cpu", offload)
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **options: empty(*a, **options))
    with pages(**form):
        assert batched(kind, num_blocks=12, cpu_offload_space=0.01) == want
    assert away


def test_layers_of_both_kinds_share_memory_without_sharing_a_byte(arch):
    """Sectors of 6 pages: 3 blocks of 2 layers, or 2 blocks of 3 layers."""
    form = page_memory.PageFormat.of_model(page_memory.Storage("int8", "int8"), torch.float32, 2, 16)
    sectors, page = 5, 4
    memory = torch.zeros(sectors * 6 * page * form.nbytes, dtype=torch.uint8)
    sizes = {"page": page, "sectors": sectors, "width": 16}
    kinds = [
        page_memory.PageMemory(form, memory, blocks=3, layers=2, **sizes),
        page_memory.PageMemory(form, memory, blocks=2, layers=3, **sizes),
    ]
    contents = {}
    for sector in range(sectors):
        kind = kinds[sector % 2]
        for block in range(sector * kind.blocks, (sector + 1) * kind.blocks):
            bytes_of_block = form.nbytes * page * (6 // kind.blocks)
            contents[sector % 2, block] = torch.randint(0, 256, (1, bytes_of_block), dtype=torch.uint8)
            kind.index_copy_(0, torch.tensor([block]), contents[sector % 2, block])
    for (number, block), content in contents.items():
        assert torch.equal(kinds[number].index_select(0, torch.tensor([block])), content)
    assert sum(content.numel() for content in contents.values()) == memory.numel()
    first = kinds[0].layer(1).arrays["k"]  # and a layer's pages are those of its blocks
    assert first.is_contiguous()
    block = contents[0, 7][:, 2 * page * 16 :][:, : 2 * page * 16]
    assert torch.equal(first[kinds[0].page_of(7)].view(torch.uint8).flatten(), block.flatten())


def blocks_of(form, monkeypatch, bits=16):
    """The tokens that fit in some memory, for a model of 16 layers with 8 KV heads of 128."""
    config = transformers.LlamaConfig(
        hidden_size=1024, num_attention_heads=8, num_key_value_heads=8, head_dim=128, num_hidden_layers=16,
        intermediate_size=8, vocab_size=64,
    )  # fmt: skip
    config._attn_implementation = batching.IN_PAGES
    room = ContinuousBatchingConfig(page_size=16, max_batch_tokens=16, max_requests_per_batch=4, max_memory_percent=0.5)
    room.use_async_batching = False
    monkeypatch.setattr(
        their_cache.PagedAttentionMemoryHandler, "get_available_memory", lambda self: 64 << 20, raising=True
    )
    storage = None if form is None else page_memory.Storage(*[batching_format(form)] * 2)
    made = page_memory.PageFormat.of_model(storage, torch.bfloat16, 8, 128)
    with page_memory.making(made):
        helper = continuous_api.DistributedHelper(device_mesh=None, cpu_group_timeout=None, tp_plan={})
        cache = their_cache.PagedAttentionCache(config, room, torch.device("cpu"), helper, torch.bfloat16)
    return cache.num_blocks


def batching_format(form):
    from tikv.integrations.transformers.memory.storage import storage_of

    return storage_of(form).k


def test_more_tokens_fit_in_the_same_memory(arch, monkeypatch):
    plain = blocks_of(None, monkeypatch)
    assert blocks_of("int8", monkeypatch) >= 1.9 * plain
    assert blocks_of(tikv.Quant(bits=4), monkeypatch) >= 3.4 * plain


def test_more_blocks_than_a_launch_addresses(arch, monkeypatch):
    model = model_of("full")
    model.set_attn_implementation("tikv")
    monkeypatch.setattr(page_memory.PageFormat, "most_tokens", 100)
    room = ContinuousBatchingConfig(page_size=4, num_blocks=64, max_batch_tokens=16)
    with pytest.raises(tikv.CapacityError, match="num_blocks=64 are more than"):
        model.generate_batch([[3, 4]], generation_config=greedy(), continuous_batching_config=room)


def test_formats_that_pages_cannot_hold(arch):
    model = model_of("full")
    model.set_attn_implementation("tikv")
    with pytest.raises(tikv.DTypeError, match="int7"), pages(dtype="int7"):
        pass
    for form in (tikv.Quant(bits=4, axis="tokens", residual=64), tikv.Quant(4, 32, recent=32), "kvarn_k4v2"):
        with pytest.raises(tikv.OptionError, match="a page can end within a group"), pages(dtype=form):
            pass
    with pytest.raises(tikv.OptionError, match="k_scale"), pages(dtype="int8", k_scale=0.5):
        pass
    with pages(dtype=tikv.Quant(bits=4, group=128)), pytest.raises(tikv.ShapeError, match="64 wide"):
        model.init_continuous_batching(greedy())
    with pages(dtype="float64"), pytest.raises(tikv.DTypeError, match="cannot be stored as float64"):
        model.init_continuous_batching(greedy())
    assert model.config._attn_implementation == "tikv"


def test_another_attention_is_refused(arch):
    model = model_of("full")
    model.set_attn_implementation("sdpa")
    with pages(dtype="int8"), pytest.raises(tikv.OptionError, match='has attention "sdpa"'):
        model.generate_batch([[3, 4]], generation_config=greedy())


def test_a_manager_keeps_its_pages(arch):
    model = model_of("full")
    model.set_attn_implementation("tikv")
    inputs = [list(p) for p in prompts()]
    room = ContinuousBatchingConfig(page_size=4, num_blocks=64, max_batch_tokens=16)
    options = {"generation_config": greedy(), "continuous_batching_config": room, "persistent_manager": True}
    want = one_by_one("full", {"dtype": "int8"})
    try:
        for _ in range(2):
            with pages(dtype="int8"):
                results = model.generate_batch(inputs, **options)
            assert sorted(r.generated_tokens for r in results.values()) == sorted(want)
        others = pytest.raises(tikv.OptionError, match="a manager of continuous batching exists whose pages hold int8")
        with others, pages(dtype="q4_0"):
            pass
        with pytest.raises(tikv.OptionError, match="pages hold int8, and now they should hold the model's dtype"):
            model.generate_batch(inputs, **options)
    finally:
        model.destroy_cached_continuous_batching_manager()
    with pages(dtype="q4_0"):
        assert batched("full") == one_by_one("full", {"dtype": "q4_0"})


def test_an_interrupt_in_the_main_thread_leaves_nothing_behind(arch, monkeypatch):
    want = one_by_one("full", {"dtype": "int8"})

    def interrupted(self, *args, **kwargs):
        raise KeyboardInterrupt

    gc.collect()
    before = len([a for a in gc.get_objects() if type(a) is page_memory.PageMemory])
    with pages(dtype="int8"):
        with monkeypatch.context() as until:
            until.setattr(continuous_api.ContinuousBatchingManager, "get_result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                batched("full")
        assert model_of("full").config._attn_implementation == "tikv"
        assert batched("full") == want
    gc.collect()
    assert len([a for a in gc.get_objects() if type(a) is page_memory.PageMemory]) == before
