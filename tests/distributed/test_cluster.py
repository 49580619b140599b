"""The formulas of examples/cluster.py against the bytes of a real run, and its table in the documentation."""

import importlib
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

cluster = importlib.import_module("cluster")


def test_the_formula_gives_the_bytes_of_a_run(two):
    pytest.importorskip("torch.distributed")
    import on_ranks

    shape = cluster.Shape(layers=2, query_heads=24, kv_heads=6, width=8)
    wanted = [cluster.gathered_bytes(shape, 2, batch=2), cluster.gathered_bytes(shape, 2, batch=2, queries=5)]
    assert two.run(on_ranks.count_bytes) == [wanted, wanted]


def test_the_page_has_what_the_example_prints():
    text = (ROOT / "docs" / "many_devices.md").read_text(encoding="utf-8")
    defaults = cluster.Cluster(3900e9, 350e9, 35e-6)
    assert f"-->\n{cluster.table(524288, 1, defaults)}\n" in text


def test_a_trace_takes_as_long_as_the_step():
    shape, defaults = cluster.MODELS["Llama-3.1-8B"], cluster.Cluster(3900e9, 350e9, 35e-6)
    events = cluster.trace(shape, 4, 100000, 2, defaults)["traceEvents"]
    assert len(events) == 4 * 2 * 32
    end = max(event["ts"] + event["dur"] for event in events)
    assert end == pytest.approx(1e6 * sum(cluster.step_seconds(shape, 4, 100000, 2, defaults)))
