"""Every argument of the peers' functions is served, has no effect and is checked, or is refused by its name."""

import ast
import importlib
import inspect
import textwrap

import numpy as np
import oracle
import pytest
from peers_signatures import SIGNATURES

import tikv

NOT_READ = {  # which follow from others, or are workspaces
    "append_paged_kv_cache": {"kv_last_page_len"},
    "append_paged_mla_kv_cache": {"kv_last_page_len"},
    "nvfp4_quantize_append_paged_kv_cache": {"kv_last_page_len"},
    "reset_workspace_buffer": {"int_workspace_buffer", "int_workspace_buffers"},
}
SPACE, F32 = np.zeros(8, np.uint8), np.float32
PAGES = (np.ones((3, 4, 2, 16), F32), np.ones((3, 4, 2, 16), F32))
HEADS = {"num_qo_heads": 4, "num_kv_heads": 2}
TABLE = {
    "indptr": np.array([0, 1, 3], np.int32),
    "indices": np.array([2, 0, 1], np.int32),
    "last_page_len": np.array([3, 2], np.int32),
}
STARTS = np.array([0, 1, 4], np.int32)
ROWS, KEYS = np.ones((4, 4, 16), F32), np.ones((7, 2, 16), F32)
LATENT = {
    **dict(zip(("qo_indptr", "kv_indptr", "kv_indices"), (STARTS, TABLE["indptr"], TABLE["indices"]), strict=True)),
    "kv_len_arr": np.array([3, 6], np.int32), "num_heads": 4, "head_dim_ckv": 8, "head_dim_kpe": 4, "page_size": 4,
    "causal": False, "sm_scale": 0.5, "q_data_type": "float32", "kv_data_type": "float32",
}  # fmt: skip
PLANS = {
    "decode.BatchDecodeWithPagedKVCacheWrapper": TABLE | HEADS | {"head_dim": 16, "page_size": 4},
    "prefill.BatchPrefillWithPagedKVCacheWrapper": {
        "qo_indptr": STARTS, **{f"paged_kv_{name}": a for name, a in TABLE.items()}, **HEADS,
        "head_dim_qk": 16, "page_size": 4,
    },
    "prefill.BatchPrefillWithRaggedKVCacheWrapper": {
        "qo_indptr": STARTS, "kv_indptr": np.array([0, 3, 7], np.int32), **HEADS, "head_dim_qk": 16,
    },
}  # fmt: skip
PLANS = {name: plan | {"q_data_type": "float32"} for name, plan in PLANS.items()}
PLANS["mla.BatchMLAPagedAttentionWrapper"] = LATENT
RUNS = {
    "decode.BatchDecodeWithPagedKVCacheWrapper": {"q": ROWS[:2], "paged_kv_cache": PAGES},
    "prefill.BatchPrefillWithPagedKVCacheWrapper": {"q": ROWS, "paged_kv_cache": PAGES},
    "prefill.BatchPrefillWithRaggedKVCacheWrapper": {"q": ROWS, "k": KEYS, "v": KEYS},
    "mla.BatchMLAPagedAttentionWrapper": {"query": np.ones((4, 4, 12), F32), "kv_cache": np.ones((3, 4, 12), F32)},
}
CALLS = {
    "flashinfer.decode.single_decode_with_kv_cache": {"q": ROWS[0], "k": KEYS, "v": KEYS},
    "flashinfer.prefill.single_prefill_with_kv_cache": {"q": ROWS, "k": KEYS, "v": KEYS},
    "flash_attn.flash_attn_func": {"q": ROWS[None], "k": KEYS[None], "v": KEYS[None]},
    "flash_attn_interface.flash_attn_func": {"q": ROWS[None], "k": KEYS[None], "v": KEYS[None]},
    "flash_attn_interface.flash_attn_qkvpacked_func": {"qkv": np.ones((2, 4, 3, 2, 16), F32)},
    "flash_attn_interface.flash_attn_varlen_func": {
        "q": ROWS, "k": KEYS, "v": KEYS, "cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "max_seqlen_q": 3,
        "max_seqlen_k": 3,
    },
    "flash_attn_interface.flash_attn_with_kvcache": {"q": ROWS[None], "k_cache": KEYS[None], "v_cache": KEYS[None]},
}  # fmt: skip
ITEMS = {"prefix_len_ptr": STARTS, "token_pos_in_items_ptr": STARTS, "token_pos_in_items_len": 3}
ITEMS |= {"max_item_len_ptr": STARTS, "seq_lens": STARTS, "seq_lens_q": STARTS, "use_token_head_sf": True}
ITEMS |= {"o_data_type": "float16"}
OF_FUNCTIONS = {"jit_args": [1], "jit_kwargs": {"a": 1}, "backend": "cudnn"}
SPARSE = {"skip_softmax_threshold_scale_factor": 1.0}
REFUSED = {
    "decode.BatchDecodeWithPagedKVCacheWrapper.__init__": OF_FUNCTIONS,
    "decode.BatchDecodeWithPagedKVCacheWrapper.plan": {
        "block_tables": STARTS[None], "seq_lens": STARTS, "window_right": 1, "use_token_head_sf": True,
        "o_data_type": "float16",
    },
    "decode.BatchDecodeWithPagedKVCacheWrapper.run": SPARSE,
    **{
        f"prefill.BatchPrefillWith{kind}KVCacheWrapper.__init__": OF_FUNCTIONS
        | {"variant_owns_mask": True, "custom_mask_buf": SPACE, "mask_indptr_buf": STARTS}
        for kind in ("Paged", "Ragged")
    },
    "prefill.BatchPrefillWithPagedKVCacheWrapper.plan": ITEMS | {"block_tables": STARTS[None]},
    "prefill.BatchPrefillWithPagedKVCacheWrapper.run": SPARSE | {"use_fp16_softmax": True, "uses_spcompress": True},
    "prefill.BatchPrefillWithRaggedKVCacheWrapper.plan": ITEMS | {"v_indptr": STARTS, "o_indptr": STARTS},
    "prefill.BatchPrefillWithRaggedKVCacheWrapper.run": {"o_scale": 2.0, "kv_cache_sf": (SPACE, SPACE)},
    "mla.BatchMLAPagedAttentionWrapper.__init__": {"backend": "cutlass"},
    "mla.BatchMLAPagedAttentionWrapper.plan": {
        "use_profiler": True, "skip_softmax": True, "output_scale": "per-tensor", "scale_mode": "kv-per-tensor",
        "output_dtype": "float16",
    },
    "mla.BatchMLAPagedAttentionWrapper.run": SPARSE
    | dict.fromkeys(("o_scale", "ckv_scale", "kpe_scale", "bmm1_scale", "bmm2_scale"), 2.0)
    | dict.fromkeys(("profiler_buffer", "kv_len", "page_table", "ckv_scale_arr"), STARTS),
    "flashinfer.prefill.single_prefill_with_kv_cache": {
        **dict.fromkeys(("scale_q", "scale_k", "scale_v"), STARTS), "o_dtype": "float16", "kv_cache_sf": (SPACE, SPACE),
        "backend": "cudnn",
    },
    "flash_attn.flash_attn_func": {"dropout_p": 0.5},
    "flash_attn_interface.flash_attn_func": {"sm_margin": 3},
    "flash_attn_interface.flash_attn_qkvpacked_func": {"sm_margin": 3},
    "flash_attn_interface.flash_attn_varlen_func": {"sm_margin": 3},
    "flash_attn_interface.flash_attn_with_kvcache": {"scheduler_metadata": SPACE, "sm_margin": 3},
}  # fmt: skip
TUNING = {"non_blocking": False, "fixed_split_size": 4, "disable_split_kv": True}
LENGTHS = {"max_token_per_sequence": 9, "max_sequence_kv": 9, "uniform_q_len": 2, "use_fp16_qk_reduction": True}
WITHOUT_EFFECT = {
    "decode.BatchDecodeWithPagedKVCacheWrapper.__init__": {"use_tensor_cores": True, "backend": "fa3"},
    "decode.BatchDecodeWithPagedKVCacheWrapper.plan": TUNING,
    "decode.BatchDecodeWithPagedKVCacheWrapper.run": {"enable_pdl": True},
    "prefill.BatchPrefillWithPagedKVCacheWrapper.plan": TUNING | LENGTHS,
    "prefill.BatchPrefillWithPagedKVCacheWrapper.run": {"enable_pdl": True},
    "prefill.BatchPrefillWithRaggedKVCacheWrapper.plan": TUNING | LENGTHS,
    "prefill.BatchPrefillWithRaggedKVCacheWrapper.run": {"enable_pdl": True},
    "mla.BatchMLAPagedAttentionWrapper.plan": {
        "max_q_len": 9, "enable_pdl": True, "query_layout": "packed", "kv_cache_layout": "split", "lse_mode": "basee",
    },
    "flashinfer.decode.single_decode_with_kv_cache": {"use_tensor_cores": True},
    "flashinfer.prefill.single_prefill_with_kv_cache": {"use_fp16_qk_reduction": True, "backend": "fa2"},
    "flash_attn.flash_attn_func": {"deterministic": True},
    "flash_attn_interface.flash_attn_func": {"deterministic": True, "num_splits": 2, "pack_gqa": False},
    "flash_attn_interface.flash_attn_with_kvcache": {"num_splits": 2, "pack_gqa": False},
}  # fmt: skip


def called(name, change=()):
    """The result of the function, or of a wrapper's run, with one argument changed."""
    change = dict(change)
    if name in CALLS:
        return ours(name)(**CALLS[name] | change)
    module, cls, method = name.split(".")
    of = {kind: change if method == kind else {} for kind in ("__init__", "plan", "run")}
    wrapper = getattr(importlib.import_module(f"tikv.compat.flashinfer.{module}"), cls)(SPACE, **of["__init__"])
    wrapper.plan(**PLANS[f"{module}.{cls}"] | of["plan"])
    return wrapper.run(**RUNS[f"{module}.{cls}"] | of["run"])


def ours(name):
    """The function of this name in `tikv.compat`."""
    parts = name.split(".")
    of_module = 2 if parts[0] == "flashinfer" else 1
    value = importlib.import_module(".".join(("tikv.compat", *parts[:of_module])))
    for part in parts[of_module:]:
        value = inspect.getattr_static(value, part)
        value = getattr(value, "func", value)  # a method with an argument filled in
    return value


def parameters_of(text):
    """(positional, all) arguments with defaults of a signature in text."""
    arguments = ast.parse(f"def f({text}): pass").body[0].args
    names = [a.arg for a in arguments.args]
    defaults = [inspect.Parameter.empty] * (len(names) - len(arguments.defaults))
    defaults += [ast.literal_eval(node) for node in arguments.defaults]
    named = dict(zip(names, defaults, strict=True))
    more = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return names, named | {a.arg: ast.literal_eval(node) for a, node in more}


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_the_peers_order_and_defaults(arch, name):
    """Ours may have more, after theirs."""
    positional, all_of_them = parameters_of(SIGNATURES[name])
    parameters = inspect.signature(ours(name)).parameters
    in_order = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert in_order[: len(positional)] == positional
    for argument, default in all_of_them.items():
        assert parameters[argument].default == default or parameters[argument].default is default, argument


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("name", SIGNATURES)
def test_each_argument_is_read(arch, name):
    """None is taken and dropped: each is named in the body of its function."""
    source = ast.parse(textwrap.dedent(inspect.getsource(ours(name)))).body[0]
    names = {node.id for node in ast.walk(ast.Module(source.body, [])) if isinstance(node, ast.Name)}
    all_of_them = set(parameters_of(SIGNATURES[name])[1]) - {"self"}
    assert all_of_them - names <= NOT_READ.get(name.rpartition(".")[2], set())


def cases(table):
    return [
        pytest.param(name, argument, value, id=f"{name}-{argument}")
        for name, arguments in table.items()
        for argument, value in arguments.items()
    ]


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(("name", "argument", "value"), cases(REFUSED))
def test_what_is_not_supported_is_refused_by_its_name(arch, name, argument, value):
    with pytest.raises(tikv.TikvError, match=argument) as error:
        called(name, {argument: value})
    assert any(word in str(error.value) for word in ("Leave it out", "Use ", "Results have", "change nothing"))


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(("name", "argument", "value"), cases(WITHOUT_EFFECT))
def test_what_has_no_effect_is_checked(arch, name, argument, value):
    oracle.assert_same_bits(called(name, {argument: value}), called(name))
    with pytest.raises(tikv.TikvError, match=argument):
        called(name, {argument: "x"})
