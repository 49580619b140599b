"""PEFT's prefix tuning and cartridges with a `TikvCache` in place of PEFT's cache: the same losses, and gradients."""

import importlib.util

import pytest

for package in ("torch", "transformers", "peft"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)

import torch  # noqa: E402
import transformers  # noqa: E402
from model_cache import BASE  # noqa: E402

from tikv.integrations.transformers import TikvCache  # noqa: E402

pytestmark = [
    pytest.mark.archs("cpu"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_thread"),
]

MODELS = {
    "Llama": {},
    "Gemma2": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2},
}
KINDS = {"PrefixTuningConfig": {"prefix_projection": True, "encoder_hidden_size": 16}, "CartridgeConfig": {}}


def model_of(name, attention):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**BASE, **MODELS[name], initializer_range=0.3)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.set_attn_implementation(attention)
    return model


def read_by_tikv(trained):
    """Have PEFT's model pass its prefix in a `TikvCache`, as the manual shows."""
    of_peft = trained.get_prompt

    def get_prompt(*args, **options):
        prompt, cache = of_peft(*args, **options), TikvCache(trained.config, grad=True)
        for i, layer in enumerate(prompt.layers):
            cache.update(layer.keys, layer.values, i)
        return cache

    trained.get_prompt = get_prompt


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_prefix_learns_as_in_pefts_own_cache(arch, name, kind):
    import peft

    ids = torch.randint(2, 97, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    losses, gradients = {}, {}
    for cache in ("ours", "theirs"):
        model = model_of(name, "tikv" if cache == "ours" else "eager")
        config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=5, **KINDS[kind])
        trained = peft.get_peft_model(model, config).eval()
        if cache == "ours":
            read_by_tikv(trained)
        weights = {n: p for n, p in trained.named_parameters() if p.requires_grad}
        assert weights
        optimizer = torch.optim.SGD(weights.values(), lr=0.3)
        losses[cache] = []
        for step in range(6):
            loss = trained(input_ids=ids, attention_mask=mask, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            if not step:
                gradients[cache] = {n: p.grad.clone() for n, p in weights.items() if p.grad is not None}
            optimizer.step()
            losses[cache].append(float(loss.detach()))
    assert losses["ours"][-1] < losses["ours"][0] - 0.02
    torch.testing.assert_close(losses["ours"], losses["theirs"], rtol=1e-4, atol=0)
    for n, want in gradients["theirs"].items():
        torch.testing.assert_close(gradients["ours"][n], want, rtol=0, atol=1e-5 * float(want.abs().max()), msg=n)
