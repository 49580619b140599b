"""`impl="auto"` goes by what `tikv bench --attention` measured on this device with this torch, and by nothing else."""

import json
import types

import numpy as np
import pytest

import tikv
from tikv import dtypes, runtime
from tikv.ops.attention import measured
from tikv.ops.attention.measured import FULL, RECTANGULAR, SQUARE, Timing, Timings
from tikv.ops.attention.torch_sdpa import MASKED, TorchAttention, report, torch_is_faster

pytestmark = pytest.mark.archs("cpu")
ROWS = (
    Timing(RECTANGULAR, "float32", 64, 1, 4096, 10.0, 20.0),
    Timing(RECTANGULAR, "float32", 64, 8, 4096, 30.0, 20.0),  # torch is faster here, and then it is not
    Timing(RECTANGULAR, "float32", 64, 32, 4096, 40.0, 50.0),
    Timing(RECTANGULAR, "float32", 64, 128, 4096, 90.0, 60.0),
    Timing(RECTANGULAR, "float32", 64, 512, 4096, 300.0, 200.0),
    Timing(RECTANGULAR, "float32", 128, 1, 4096, 10.0, 20.0),
    Timing(RECTANGULAR, "float32", 128, 2048, 4096, 10.0, 20.0),
    Timing(RECTANGULAR, "bfloat16", 128, 1, 4096, 10.0, 9.0),
    Timing(SQUARE, "float32", 64, 64, 64, 10.0, 20.0),
    Timing(SQUARE, "float32", 64, 512, 512, 20.0, 30.0),
    Timing(FULL, "float32", 64, 1, 4096, 10.0, 9.0),
)


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    """A file of this test's own."""
    monkeypatch.setenv(measured.VARIABLE, str(tmp_path / "folder" / "attention.json"))
    measured._timings_and_why.cache_clear()
    yield tmp_path / "folder" / "attention.json"
    measured._timings_and_why.cache_clear()


@pytest.fixture
def live(arch):
    return runtime.current()


def timed(torch=None):
    return Timings("2026-11-25", torch or runtime.version_of("torch"), ROWS)


def faster(live, queries, dtype="float32", head_dim=64, tensor_cores=False, kind=RECTANGULAR):
    return torch_is_faster(live, kind, queries, tensor_cores, dtypes.parse(dtype, "test"), head_dim)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "least"),
    [
        ("float32", 64, 128),
        ("float32", 80, 128),  # the nearest width that was timed
        ("float32", 96, 128),  # as near to 128: the narrower one
        ("float32", 128, None),
        ("float32", 512, None),
        ("bfloat16", 64, 1),
    ],
)
def test_torch_is_taken_from_where_it_is_faster_for_good(dtype, head_dim, least):
    assert Timings("", "", ROWS).least_queries(RECTANGULAR, dtype, head_dim) == least


def test_a_table_decides(live, file):
    pytest.importorskip("torch")
    assert [faster(live, n) for n in (1, 63, 64)] == [False, False, True]
    assert "nothing was measured here" in report(live)
    assert measured.write(live, timed()) == file
    assert [faster(live, n) for n in (8, 64, 127, 128, 4096)] == [False, False, False, True, True]
    assert not faster(live, 4096, head_dim=128)
    assert faster(live, 1, "bfloat16")
    assert faster(live, 64, "float16"), "it was not timed: the default"
    assert "measured on 2026-11-25" in report(live)
    assert report(live).endswith(
        "; causal rectangular: torch for float32 of head_dim 64 from 128 queries, bfloat16 of head_dim 128 from 1 "
        "query, otherwise tikv; causal square: tikv; not causal: torch for float32 of head_dim 64 from 1 query, "
        "otherwise tikv"
    )
    assert tikv.info()["attention_auto"] == report(live)


def test_each_kind_has_its_own_times(live):
    measured.write(live, timed())
    assert [faster(live, 4096, kind=kind) for kind in (SQUARE, RECTANGULAR, FULL)] == [False, True, True]
    assert [faster(live, 1, kind=kind) for kind in (SQUARE, RECTANGULAR, FULL)] == [False, False, True]
    assert faster(live, 64, kind=MASKED), "it is not timed: the default"
    assert not faster(live, 63, kind=MASKED)


@pytest.mark.parametrize(
    ("queries", "length", "options", "kind"),
    [
        (64, 64, {}, SQUARE),
        (64, 65, {}, RECTANGULAR),
        (64, 65, {"first_valid": 1}, SQUARE),
        (64, 65, {"causal": False}, FULL),
        (None, 65, {}, FULL),
        (64, 65, {"window": 65}, RECTANGULAR),
        (64, 65, {"window": 64}, MASKED),
        (64, 65, {"first_valid": 2}, MASKED),  # the first query sees nothing
    ],
)
def test_a_call_is_of_a_kind(live, no_plans, monkeypatch, queries, length, options, kind):
    pytest.importorskip("torch")
    kinds, find = [], TorchAttention.kind
    monkeypatch.setattr(TorchAttention, "kind", lambda *given: kinds.append(find(*given)) or kinds[-1])
    monkeypatch.setattr(TorchAttention, "faster", {kind})
    q, cache = np.ones((1, 2, *([queries] if queries else []), 8), np.float32), np.ones((1, 1, 70, 8), np.float32)
    assert (tikv.decode_attention(q, cache, cache, length, **options) <= 1).all()
    assert kinds == [kind, kind], "asked by the choice, and by torch's attention, so it was chosen"


def test_another_torch_and_another_device_are_measured_again(live, file):
    measured.write(live, timed(torch="1.0"))
    assert measured.timings(live) is None
    installed = runtime.version_of("torch")
    assert f"was measured with torch 1.0, and {f'torch {installed}' if installed else 'no torch'} is" in report(live)
    told = json.loads(file.read_text())
    told["devices"] = {"cuda: another": told["devices"].popitem()[1]}
    file.write_text(json.dumps(told))
    measured._timings_and_why.cache_clear()
    assert measured.timings(live) is None
    assert "nothing was measured on this device" in report(live)
    measured.write(live, timed())
    assert sorted(json.loads(file.read_text())["devices"]) == sorted(["cuda: another", measured.device_of("cpu")])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"form": 1, "devices": {}}', '{"form": 2, "devices": {"%s": {}}}'])
def test_a_file_that_cannot_be_read_is_named_and_replaced(live, file, caplog, text):
    file.parent.mkdir()
    file.write_text(text.replace("%s", measured.device_of("cpu")))
    assert measured.timings(live) is None
    assert str(file) in report(live)
    assert [str(file) in record.getMessage() for record in caplog.records] == [True], "said once"
    measured.write(live, timed())
    assert json.loads(file.read_text())["devices"][measured.device_of("cpu")]["day"] == "2026-11-25"


def test_a_file_that_cannot_be_written(live, file):
    file.parent.write_text("a file where a folder should be")
    with pytest.raises(tikv.TikvError, match=r"^bench: .*attention\.json' cannot be written .* TIKV_ATTENTION_TABLE"):
        measured.write(live, timed())


def test_a_variable_does_without(live, monkeypatch):
    measured.write(live, timed())
    monkeypatch.setenv(measured.VARIABLE, "off")
    assert measured.timings(live) is None
    assert report(live) == (
        "tikv's own defaults: TIKV_ATTENTION_TABLE=off; torch from 64 queries of float32 or 64 queries of float16, "
        "otherwise tikv"
    )
    with pytest.raises(tikv.TikvError, match="Unset it"):
        measured.write(live, timed())


@pytest.mark.parametrize(
    ("arch_name", "says"),
    [
        ("cuda", "; torch where tensor cores are not used, otherwise tikv"),
        ("vulkan", "tikv: torch cannot share memory"),
    ],
)
def test_a_report_says_what_is_taken_without_a_table(monkeypatch, arch_name, says):
    monkeypatch.setattr(measured, "device_of", lambda arch: f"{arch}: a device")
    live = types.SimpleNamespace(invariant=False, is_spirv=arch_name == "vulkan", is_cpu=False, arch=arch_name)
    assert says in report(live)


def test_invariant_asks_nobody(live, monkeypatch):
    measured.write(live, timed())
    invariant = types.SimpleNamespace(invariant=True, is_cpu=True, arch="cpu")
    assert report(invariant).startswith("tikv: the bits of torch's results depend")
    assert not torch_is_faster(invariant, RECTANGULAR, 4096, False, dtypes.float32, 64)
