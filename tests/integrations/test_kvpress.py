"""kvpress's methods run on a `TikvCache` as they are: the text that follows is that of transformers' own cache."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

for package in ("torch", "transformers", "kvpress"):
    if importlib.util.find_spec(package) is None:  # an import would wrap the attention functions of other tests
        pytest.skip(f"{package} is not installed", allow_module_level=True)

pytestmark = [pytest.mark.archs("cpu"), pytest.mark.filterwarnings("default")]

TEXTS = pathlib.Path(__file__).with_name("kvpress_texts.py")


@pytest.mark.parametrize(("order", "methods"), [("tikv", []), ("kvpress", ["by head", "knorm", "decoding"])])
def test_methods_leave_what_they_leave_of_transformers_own_cache(order, methods):
    """The same tokens held and written, by attention sdpa and tikv, and memory for what is held alone."""
    done = subprocess.run(
        [sys.executable, TEXTS, order, *methods], capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report) == 2 * (len(methods) or 13)
    for name, attention, same, held, capacities in report:
        assert same, f"{name} with attention {attention}: another text, or other tokens held"
        if name not in ("by head", "decoding", "think"):  # which keep all tokens, or drop them later
            assert all(capacity <= max(256, 2 * n) for capacity, n in zip(capacities, held, strict=True)), name
