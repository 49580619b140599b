"""FlashInfer's `forward`, whose options replace those of the plan, its fast plan, and forms of the log-sum-exp."""

import functools

import numpy as np
import oracle
import pytest
from test_flashinfer_wrappers import CASES, compared, filled, name_of, options_of, paged, placed, requests_of, values

import tikv
from tikv.compat import flashinfer

pytestmark = pytest.mark.thorough

OTHER = {"causal": False, "window_left": 2, "logits_soft_cap": 5.0, "sm_scale": 0.1}  # what plans say before forward


def space(arch):
    return placed(np.zeros(8, np.uint8), arch)


@pytest.mark.full("vulkan", unless=lambda params: params["case"] == CASES[0])
@pytest.mark.parametrize("case", [c for c in CASES if "mask" not in c], ids=name_of)
def test_options_of_forward_replace_those_of_the_plan(arch, rng, case):
    (q, k, v), starts, of_keys, _ = requests_of(rng, 2, 2, 32)
    cache, *table = paged(rng, k, v, of_keys, 5, "NHD")
    table = [placed(a, arch) for a in (starts, *table)]
    options, _ = options_of(case)
    pages = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space(arch))
    pages.plan(*table, 4, 2, 32, 5, q_data_type="float32", **OTHER)
    out, lse = pages.forward_return_lse(placed(q, arch), placed(cache, arch), **options)
    compared(out, lse, q, k, v, starts, of_keys, case)
    oracle.assert_same_bits(oracle.to_numpy(pages.run(placed(q, arch), placed(cache, arch))), oracle.to_numpy(out))
    rows = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(space(arch))
    rows.begin_forward(table[0], placed(of_keys, arch), 4, 2, 32, q_data_type="float32", **OTHER)
    keys = [placed(a, arch) for a in (k, v)]
    out, lse = rows.forward_return_lse(placed(q, arch), *keys, **options)
    compared(out, lse, q, k, v, starts, of_keys, case)
    oracle.assert_same_bits(oracle.to_numpy(rows.forward(placed(q, arch), *keys, **options)), oracle.to_numpy(out))
    rows.end_forward()


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("each", [1, 3])
def test_forward_of_decoding(arch, rng, each):
    """Whether queries of one request see each other stays as in the plan."""
    case = {"causal": each > 1, "window": 4, "softcap": 3.0}
    (q, k, v), starts, of_keys, _ = requests_of(rng, 2, 4, 32, counts=(each,) * 3, lengths=(9, 4, 17))
    cache, *table = paged(rng, k, v, of_keys, 5, "NHD")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space(arch))
    wrapper.begin_forward(*table, 8, 2, 32, 5, q_data_type="float32", q_len_per_req=each)
    options, _ = options_of(case)
    del options["causal"]
    out, lse = wrapper.forward_return_lse(q, cache, **options)
    compared(out, lse, q, k, v, starts, of_keys, case)
    scaled = wrapper.forward(q, cache, q_scale=0.5, v_scale=2.0, **options)
    want = wrapper.run(q, cache, q_scale=0.5, v_scale=2.0)
    oracle.assert_same_bits(scaled, want)


@pytest.mark.archs("cpu")
def test_forward_with_a_mask_keeps_the_mask(arch, rng):
    case = {"mask": True, "softcap": 2.0}
    (q, k, v), starts, of_keys, masks = requests_of(rng, 2, 2, 32)
    cache, *table = paged(rng, k, v, of_keys, 5, "NHD")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space(arch))
    mask = np.concatenate([a.ravel() for a in masks])
    wrapper.plan(starts, *table, 4, 2, 32, 5, q_data_type="float32", custom_mask=mask)
    out, lse = wrapper.forward_return_lse(q, cache, logits_soft_cap=2.0)
    compared(out, lse, q, k, v, starts, of_keys, case, masks)
    with pytest.raises(tikv.OptionError, match="window_left=3 is not supported"):
        wrapper.forward(q, cache, window_left=3)
    oracle.assert_same_bits(wrapper.run(q, cache), out)


@pytest.mark.archs("cpu")
def test_forward_without_a_plan_and_with_graphs(arch):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space(arch))
    q, cache = np.ones((1, 4, 16), np.float32), (np.ones((2, 4, 2, 16), np.float32),) * 2
    with pytest.raises(tikv.OptionError, match="there is no plan yet"):
        wrapper.forward(q, cache)
    buffers = [np.zeros(n, np.int32) for n in (2, 2, 1)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(space(arch), *buffers)
    wrapper.plan(np.array([0, 1]), np.array([1]), np.array([3]), 4, 2, 16, 4, q_data_type="float32")
    assert wrapper.forward(q, cache).shape == q.shape
    with pytest.raises(tikv.OptionError, match="options of forward must be those of the plan"):
        wrapper.forward(q, cache, window_left=1)


@pytest.mark.archs("cpu")
def test_the_fast_plan_in_place_of_plan(arch, rng):
    """Engines replace a wrapper's `plan` by it, and pass the host's numbers beside those of the device."""
    case = {"window": 4}
    (q, k, v), starts, of_keys, _ = requests_of(rng, 2, 4, 32, counts=(1,) * 3, lengths=(9, 4, 17))
    cache, indptr, indices, last = paged(rng, k, v, of_keys, 5, "NHD")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space(arch))
    wrapper.plan = functools.partial(flashinfer.fast_decode_plan, wrapper)
    for on_host in (None, indptr):
        read = indptr if on_host is None else np.zeros_like(indptr)
        wrapper.plan(
            read, indices, last, 8, 2, 32, 5, window_left=4, data_type="float32", global_override_indptr_cpu=on_host
        )
        out, lse = wrapper.run_return_lse(q, cache)
        compared(out, lse, q, k, v, starts, of_keys, case)
    wrapper.plan(indptr, indices, last, 8, 2, 32, 5)
    with pytest.raises(tikv.DTypeError, match="q_data_type=float16"):
        wrapper.run(q, cache)
    with pytest.raises(tikv.OptionError, match="self is ndarray"):
        flashinfer.fast_decode_plan(q, indptr, indices, last, 8, 2, 32, 5)


@pytest.mark.full(each_value=True)
@pytest.mark.parametrize("counts", [(1, 0, 5, 19, 2, 3), (3,) * 6, (1,) * 6], ids=["tiles", "alike", "one"])
@pytest.mark.parametrize("case", [{"causal": True}, {"mode": "ALIBI"}, {"mode": "ROPE_LLAMA"}], ids=name_of)
def test_forms_of_the_log_sum_exp(arch, rng, case, counts):
    (q, k, v), starts, of_keys, _ = requests_of(rng, 2, 2, 32, counts=counts)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(space(arch))
    indptr = [placed(a, arch) for a in (starts, of_keys)]
    wrapper.plan(*indptr, 4, 2, 32, q_data_type="float32", **options_of(case)[0])
    arrays = [placed(a, arch) for a in (q, k, v)]
    out, lse = wrapper.run(*arrays, return_lse=True)
    compared(out, lse, q, k, v, starts, of_keys, case)
    for base, factor in (("log2", 1.0), ("ln", np.log(2))):
        for layout in ("NH", "HN"):
            again, other = wrapper.run(*arrays, return_lse=True, lse_base=base, lse_layout=layout)
            oracle.assert_same_bits(oracle.to_numpy(again), oracle.to_numpy(out))
            assert tuple(other.shape) == (q.shape[:2] if layout == "NH" else q.shape[1::-1])
            of_tokens = values(other) if layout == "NH" else values(other).T
            np.testing.assert_allclose(of_tokens, values(lse) * factor, rtol=1e-6, atol=2e-5)
            to = filled(other)
            result = wrapper.run(*arrays, lse=to, return_lse=True, lse_base=base, lse_layout=layout)
            assert result[1] is to
            oracle.assert_same_bits(oracle.to_numpy(to), oracle.to_numpy(other))
    for option, words in (
        ({"lse_base": "e"}, "lse_base='e'"),
        ({"lse_layout": "TH"}, "lse_layout='TH'"),
        ({"lse_layout": "HN", "lse": filled(lse)}, r"lse is .* where \(4, "),
    ):
        with pytest.raises(tikv.TikvError, match=words):
            wrapper.run(*arrays, return_lse=True, **option)


@pytest.mark.archs("cpu")
def test_starts_on_the_host(arch, rng):
    """Those of the device are not read then."""
    (q, k, v), starts, of_keys, _ = requests_of(rng, 2, 2, 32)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(space(arch))
    on_host = {"qo_indptr_cpu": starts, "kv_indptr_cpu": of_keys}
    wrapper.plan(starts * 0, of_keys * 0, 4, 2, 32, q_data_type="float32", **on_host)
    compared(*wrapper.run_return_lse(q, k, v), q, k, v, starts, of_keys, {})
    for name in on_host:
        with pytest.raises(tikv.TikvError, match=name):
            wrapper.plan(starts, of_keys, 4, 2, 32, q_data_type="float32", **{name: on_host[name][:-1]})


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("each", [None, False, True])
def test_decoded_queries_that_see_all(arch, rng, each):
    """`is_causal` says whether queries of one request see each other."""
    (q, k, v), starts, of_keys, _ = requests_of(rng, 2, 4, 32, counts=(3,) * 3, lengths=(9, 4, 17))
    cache, *table = paged(rng, k, v, of_keys, 5, "NHD")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space(arch))
    wrapper.plan(*table, 8, 2, 32, 5, q_data_type="float32", q_len_per_req=3, is_causal=each)
    out, lse = wrapper.run_return_lse(q, cache)
    compared(out, lse, q, k, v, starts, of_keys, {"causal": each is not False})
