"""Tiny random models of the families that the installed transformers has, made from their own configurations.

`generators(folder)` lists the classes of a family that generate; `tiny_model(cls)` makes one of few, narrow layers
whose weights are so large that attention counts. What the rules here cannot shrink stands in `family_table.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import pathlib
import re
from typing import Any

import family_table as table
import torch
import transformers

Configuration = getattr(transformers, "PreTrainedConfig", None) or transformers.PretrainedConfig  # as before 5.0
MODELS = pathlib.Path(transformers.__file__).parent / "models"
VOCABULARY = 99
ORDINARY = range(12, 70)  # tokens that no configuration gives a meaning
MOST_PARAMETERS = 40_000_000
MOST_LAYERS = 12

HIDDEN, HEADS, KV_HEADS, WIDTH, INNER, EXPERTS, WINDOW, RANK = 32, 4, 2, 8, 48, 4, 6, 16
LAYERS = -1  # as many as the configuration is being tried with

# The first rule with a pattern that is found in a field's name says the largest number that the field keeps.
RULES: list[tuple[int, list[str]]] = [
    (4, [r"^rotary_dim$", r"num_filters$", r"n_filters$"]),
    (4, [r"^index_topk$"]),  # fewer than the tokens of a prompt
    (16, [r"^index_n_heads$"]),  # of a few heads many scores are 0, and ties are broken as it comes
    (2, [r"^index_block_size$", r"^index_topk_blocks$", r"^index_kpool$"]),
    (HIDDEN, [r"upsample_groups$"]),
    (LAYERS, [r"layers?$", r"(^|_)depth$", r"num_\w*layers\w*$"]),
    (VOCABULARY, [r"(^|_)vocab(ulary)?_size\w*$", r"^vocab\w*$", r"_vocab$"]),
    (KV_HEADS, [r"(key_value|kv|query_key_value)_heads?$", r"^multi_query_group_num$", r"^linear_num_key_heads$"]),
    (8, [r"mamba_n(um)?_heads$", r"^mamba_num_heads$", r"^n_mamba_heads$"]),
    (1, [r"mamba_n_groups$", r"^n_groups$", r"mamba_ngroups$", r"^topk_group$"]),
    (HEADS, [r"heads?$"]),
    (2, [r"experts_per_tok\w*$", r"moe_(top)?k$", r"^top_?k\w*$", r"_experts_top_k$", r"^n_group$"]),
    (EXPERTS, [r"experts$", r"^num_experts\w*$"]),
    (WIDTH, [r"head_dim\w*$", r"^d_kv$", r"_head_size$", r"^kv_channels$", r"^d_head$", r"_d_head$", r"_headdim$"]),
    (RANK, [r"(^|_)rank$"]),
    (8, [r"(^|_)d?_?state(_size|_dim)?$"]),
    (WINDOW, [r"window_size$", r"sliding_window$", r"attention_chunk_size$", r"^local_attention_window\w*$"]),
    (INNER, [r"intermediate\w*$", r"ffn_\w*(dim|hidden_size)\w*$", r"_inner$", r"^d_ff$", r"mlp_\w*dim$"]),
    (128, [r"max_\w*position\w*$", r"^n_positions$", r"^n_ctx$", r"max_seq_len\w*$", r"max_sequence_length$"]),
    (HIDDEN, [r"(hidden|embed|embd|emb|model|channel|proj|bottleneck|lru)\w*$", r"(^|_)dim$", r"(^|_)width$"]),
    (HIDDEN, [r"^adapter_in"]),
]  # fmt: skip
_RULES = [(most, re.compile("|".join(patterns))) for most, patterns in RULES]
_TOKEN = re.compile(r"token_ids?$|token_index$|token_id_\w+$|_token$|_start_id$|_end_id$|_token_idx$")
_KEPT = re.compile(
    r"kernel|patch|image_size|stride|period|offset|temporal|num_channels|in_channels|_version|mel|sampling|multiplier"
)


class TooLarge(Exception):
    """A model that the rules leave with too many parameters."""


def _files(folder: str = "*") -> list[pathlib.Path]:
    """The files with a family's models for torch."""
    found = sorted(MODELS.glob(f"{folder}/modeling_*.py"))
    return [path for path in found if not path.stem.startswith(("modeling_flax_", "modeling_tf_"))]


def folders() -> list[str]:
    """The families with a class that generates."""
    found = {path.parent.name for path in _files() if "GenerationMixin" in path.read_text(encoding="utf-8")}
    return sorted(found - {"auto"})


def generators(folder: str) -> list[type]:
    """The classes of a family that generate, in the order of its files."""
    found = {}
    for path in _files(folder):
        module = importlib.import_module(f"transformers.models.{folder}.{path.stem}")
        for cls in vars(module).values():
            if not isinstance(cls, type) or cls.__module__ != module.__name__:
                continue
            if not issubclass(cls, transformers.PreTrainedModel) or not issubclass(cls, transformers.GenerationMixin):
                continue
            if cls.__name__.endswith("PreTrainedModel") or getattr(cls, "config_class", None) is None:
                continue
            found[cls.__name__] = cls
    return list(found.values())


class _Shrinking:
    """One configuration being shrunk: which number each special token has got."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}

    def token(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self.token(item) for item in value]
        if not isinstance(value, int) or isinstance(value, bool) or value < ORDINARY.start:
            return value
        return self.tokens.setdefault(value, VOCABULARY - 1 - len(self.tokens))

    def dict(self, fields: dict[str, Any], layers: int) -> dict[str, Any]:
        count = next(
            (fields[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(fields.get(n), int)), None
        )
        found: dict[str, Any] = {}
        for name, value in fields.items():
            if isinstance(value, dict):
                found[name] = value if name.startswith(("rope", "id2label", "label2id")) else self.dict(value, layers)
            elif _TOKEN.search(name):
                found[name] = self.token(value)
            elif isinstance(value, list) and count and len(value) in (count, count - 1, count + 1) and count > 4:
                continue  # one entry a layer, which the configuration makes itself
            elif isinstance(value, int) and not isinstance(value, bool):
                found[name] = self.number(name, value, layers, fields)
            else:
                found[name] = value
        return found

    def number(self, name: str, value: int, layers: int, fields: dict[str, Any]) -> int:
        if _KEPT.search(name):
            return value
        heads = fields.get(name.replace("key_value", "attention"))
        if "key_value_heads" in name and value == heads:
            return min(value, HEADS)
        for most, rule in _RULES:
            if rule.search(name):
                return min(value, layers if most == LAYERS else most)
        return value


_DERIVED = {"per_layer_config", "dtype", "torch_dtype", "transformers_version", "architectures", "rope_scaling"}


def _declared(config_class: type) -> dict[str, Any]:
    """The fields of a configuration and what they are by default, before it derives others from them."""
    if dataclasses.is_dataclass(config_class):
        found = {}
        for field in dataclasses.fields(config_class):
            if field.default is not dataclasses.MISSING:
                found[field.name] = field.default
            elif field.default_factory is not dataclasses.MISSING:
                found[field.name] = field.default_factory()
        return found
    parameters = inspect.signature(config_class.__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _field(config: Any, name: str) -> Any:
    """None also where a field is of single layers, which transformers says by an error."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def _plain(config: Any) -> dict[str, Any]:
    """What to make this configuration of: what its class declares, what is set otherwise, and its parts in dicts."""
    config_class = type(config)
    usual = config_class()
    inherited = _declared(Configuration) if dataclasses.is_dataclass(config_class) else {}
    found: dict[str, Any] = {}
    for name, value in _declared(config_class).items():
        if name in _DERIVED or (name in inherited and name not in vars(config_class)):
            continue
        part = _field(config, name)
        if isinstance(part, Configuration):
            found[name] = _plain(part)
            if part.model_type:
                found[name]["model_type"] = part.model_type
        elif part != _field(usual, name) and not isinstance(value, (list, dict)):
            found[name] = part
        elif value is not None:
            found[name] = value
    for name in getattr(config_class, "sub_configs", {}):
        part = getattr(config, name, None)
        if name not in found and isinstance(part, Configuration):
            found[name] = {**_plain(part), "model_type": part.model_type}
    return found


def _merged(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    found = dict(fields)
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(found.get(name), dict) and not name.startswith("rope"):
            found[name] = _merged(found[name], value)
        elif value is table.ABSENT:
            found.pop(name, None)
        else:
            found[name] = value
    return found


def _kinds(config: Any) -> list[str]:
    text = config.get_text_config(decoder=True)
    return list(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or [])


def tiny_config(cls: type) -> Any:
    """The configuration of a tiny model of a class, with every kind of layer that its own has."""
    config_class = cls.config_class
    if cls.__name__ in table.CONFIGURATIONS:
        return table.CONFIGURATIONS[cls.__name__]()
    default = config_class(**copy.deepcopy(table.START.get(cls.__name__, table.START.get(config_class.__name__, {}))))
    wanted = set(_kinds(default))
    changes = table.OVERRIDES.get(cls.__name__, table.OVERRIDES.get(config_class.__name__, {}))
    error: Exception | None = None
    best = None
    for layers in range(2, MOST_LAYERS + 1):
        fields = _merged(_Shrinking().dict(_plain(default), layers), changes)
        try:
            config = config_class(**copy.deepcopy(fields))
            kinds = set(_kinds(config))
        except Exception as e:  # a count of layers that the family does not take
            error = e
            continue
        if best is None:
            best = config
        if kinds >= wanted:
            return config
    if best is None:
        assert error is not None
        raise error
    return best


def tiny_model(cls: type, seed: int = 0) -> Any:
    """A random model in float32, whose attention matters to its logits.

    Raises:
        TooLarge: the rules leave it too large.
    """
    config = tiny_config(cls)
    with torch.device("meta"):
        try:
            size = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
        except Exception:  # a model that is not made on this device shows its error on the CPU
            size = 0
    if size > MOST_PARAMETERS:
        raise TooLarge(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(seed)
    model = cls(config).float().eval()
    enlarge(model, seed)
    return model


@torch.no_grad()
def enlarge(model: Any, seed: int) -> None:
    """Weights as large as a trained model's: attention is not flat, gates are open, biases are not zero."""
    numbers = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            continue
        noise = torch.randn(parameter.shape, generator=numbers, dtype=parameter.dtype)
        if not parameter.isfinite().all():
            parameter.copy_(noise * 0.3)
        elif parameter.ndim < 2:
            if parameter.abs().max() == 0:
                parameter.copy_(0.3 * noise if parameter.numel() > 1 else torch.full_like(noise, 0.7))
            elif (parameter == parameter.flatten()[0]).all() and parameter.numel() > 1:
                parameter.add_(0.1 * noise)
        elif "conv" not in name and "A_log" not in name:
            spread = parameter.std()
            wanted = max(parameter.shape[-1], 8) ** -0.5
            if spread == 0:
                parameter.copy_(noise * wanted)
            elif spread < wanted:
                parameter.mul_(wanted / spread)
