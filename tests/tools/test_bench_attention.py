"""`tikv bench --attention`: both ways compared and timed, and a table by which `impl="auto"` goes."""

import json

import pytest

import tikv
from tikv.__main__ import main
from tikv.ops.attention import measured
from tikv.ops.attention.measured import FULL, RECTANGULAR, SQUARE
from tikv.tools import bench_attention

pytestmark = pytest.mark.archs("cpu")
pytest.importorskip("torch")


@pytest.fixture
def file(arch, tmp_path, monkeypatch):
    monkeypatch.setenv(measured.VARIABLE, str(tmp_path / "attention.json"))
    monkeypatch.setattr(bench_attention, "KEYS", 96)
    monkeypatch.setattr(bench_attention, "QUERIES", {"cpu": {SQUARE: (64,), RECTANGULAR: (8, 64), FULL: (1,)}})
    monkeypatch.setattr(bench_attention, "WIDTHS", (16,))
    measured._timings_and_why.cache_clear()
    yield tmp_path / "attention.json"
    measured._timings_and_why.cache_clear()


def test_it_writes_a_table_that_auto_goes_by(file, capsys):
    assert main(["bench", "--attention", "--arch", "cpu", "--seconds", "0.1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["file"] == str(file)
    assert [tuple(row.values())[:5] for row in told["rows"]] == [
        (kind, dtype, 16, queries, keys)
        for kind, shapes in ((SQUARE, [(64, 64)]), (RECTANGULAR, [(8, 96), (64, 96)]), (FULL, [(1, 96)]))
        for dtype in ("float32", "float16", "bfloat16")
        for queries, keys in shapes
    ]
    assert all(row["tikv_us"] > 0 and row["torch_us"] > 0 for row in told["rows"])
    assert json.loads(file.read_text())["devices"][measured.device_of("cpu")]["rows"] == told["rows"]
    assert str(file) in tikv.info()["attention_auto"]


def test_a_person_sees_which_is_faster(file, capsys):
    assert main(["bench", "--attention", "--arch", "cpu", "--seconds", "0.1"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("float32") == 4
    for kind in measured.KINDS:
        assert f"tikv bench --attention, {kind} (one sequence" in shown
    assert 'tikv.info()["attention_auto"]' in " ".join(shown.split())


def test_results_that_differ_are_no_times(file, monkeypatch):
    attend = bench_attention.attention.decode_attention

    def wrong(q, k, v, keys, *, out, causal, impl):
        attend(q, k, v, keys, out=out, causal=causal, impl=impl)
        if impl == "torch":
            out += 1

    monkeypatch.setattr(bench_attention.attention, "decode_attention", wrong)
    machine = bench_attention.start("cpu")
    with pytest.raises(tikv.TikvError, match=r"^bench: tikv's and torch's attention differ, for 64 float32 queries"):
        bench_attention.time_shape(machine, bench_attention.AttentionShape(RECTANGULAR, "float32", 16, 64), 0.01)
    assert not file.exists()


@pytest.mark.parametrize("more", [["--arch", "cpu,vulkan"], ["--plot", "picture.svg"]])
def test_what_does_not_go_together_is_refused(file, capsys, more):
    assert main(["bench", "--attention", *more]) == 2
    assert "--attention measures one back end" in capsys.readouterr().err
    assert not file.exists()
