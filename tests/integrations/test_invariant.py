"""Models of transformers under ``tikv.init(invariant=True)``: attention "tikv" reads prompts, with the same bits."""

import numpy as np
import pytest
from invariance import invariant, same

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

from tikv.integrations.transformers import TikvCache  # noqa: E402
from tikv.integrations.transformers.attention.attend import attend  # noqa: E402
from tikv.integrations.transformers.memory import stored_ops  # noqa: E402

pytestmark = [pytest.mark.archs("cpu", "cuda"), pytest.mark.filterwarnings("default")]
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def model(arch):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS)).to(arch).eval()


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 40}, {"dtype": "q8_0"}], ids=["grows", "fixed", "codes"])
def test_torch_attends_to_no_prompt(arch, model, monkeypatch, options):
    """A prompt, a second chunk of it and a token."""
    if options.get("dtype") and model.config.head_dim % 32:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"head_dim": 32}, **HEADS)).to(arch)
    ids = torch.randint(2, 97, (2, 18), generator=torch.Generator().manual_seed(1)).to(arch)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        model.set_attn_implementation("tikv")

        def refuse(*arguments, **options):
            raise AssertionError("torch attends")

        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", refuse)
        with invariant():
            cache, found = TikvCache(model.config, **options), []
            for first, end in ((0, 12), (12, 17), (17, 18)):
                found.append(model(ids[:, first:end], past_key_values=cache).logits)
    tolerance = 0.1 if options.get("dtype") else 1e-4
    np.testing.assert_allclose(torch.cat(found, 1).cpu(), want.cpu(), atol=tolerance)


def test_chunks_of_a_prompt_and_compiled_steps(arch, model, rng):
    """The function that models call, and the operator of a compiled step."""
    module = model.model.layers[0].self_attn
    q, k, v = (torch.from_numpy(rng.standard_normal((2, h, 40, 8)).astype(np.float32)).to(arch) for h in (4, 2, 2))
    with invariant(128), torch.no_grad():
        whole = attend(module, q, k, v, None)[0]
        for first, end in ((0, 25), (25, 40), (39, 40)):
            part = attend(module, q[:, :, first:end], k[:, :, :end], v[:, :, :end], None)[0]
            same(part, whole[:, first:end])
        lens = torch.tensor([40, 31], dtype=torch.int32, device=arch)
        asked = torch.stack([q[0, :, 39], q[1, :, 30]])[:, :, None]
        step = stored_ops.attend_stored(asked, k, v, None, None, lens, None, None, None, 8, "", "")
        same(step[:, :, 0], torch.stack([whole[0, 39], whole[1, 30]]))
