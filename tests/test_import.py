"""`import tikv` is quiet, light and quick; each claim is tried in a process of its own."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

import tikv

BASELINE = "import numpy, ml_dtypes"


def run(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a user would, without the settings this test session makes."""
    ours = ("ENABLE_TAICHI_HEADER_PRINT", "TI_SKIP_VERSION_CHECK", "TI_OFFLINE_CACHE_FILE_PATH", "TIKV_LAUNCHER")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=True)


def test_import_says_nothing():
    child = run("import tikv")
    assert (child.stdout, child.stderr) == ("", "")


def test_first_use_says_nothing():
    child = run(
        "import numpy as np, tikv\n"
        "tikv.init(arch='cpu')\n"
        "tikv.copy(np.ones((1, 1, 4), np.float32), np.zeros((1, 2, 4), np.float32), position=0)"
    )
    assert (child.stdout, child.stderr) == ("", "")


@pytest.mark.parametrize(
    "module",
    ["taichi", "quadrants", "torch", "transformers", "safetensors", "rich", "matplotlib", "importlib.metadata"],
)
def test_import_loads_no(module):
    child = run(f"import sys, tikv; print({module!r} in sys.modules)")
    assert child.stdout == "False\n"


def test_every_module_is_an_attribute_loaded_on_first_use():
    child = run(
        "import sys, tikv\n"
        "assert not {'torch', 'taichi'} & set(sys.modules)\n"
        "print(tikv.compat.flashinfer.merge_state, tikv.compat.mlx.load_prompt_cache, 'torch_ops' in dir(tikv))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    assert child.stdout.endswith("True\n")
    pytest.importorskip("torch")
    child = run("import tikv; print(tikv.torch_ops.write_slots, tikv.compat.vllm.copy_blocks)")
    assert "function write_slots" in child.stdout


def test_a_module_whose_library_is_missing_says_so():
    child = run(
        "import sys, tikv\n"
        "sys.modules['torch'] = None\n"
        "print(hasattr(tikv, 'torch_ops'), hasattr(tikv.compat, 'nothing'))\n"
        "try: tikv.torch_ops\n"
        "except AttributeError as error: print(error)"
    )
    assert child.stdout.startswith(
        "False False\ntikv.torch_ops needs torch, which is not installed. Install taichi-kv["
    )


def test_a_cache_of_transformers_is_missed_by_the_name_of_its_module():
    with pytest.raises(AttributeError, match=r"no attribute 'TikvCache'\. It is in tikv\.integrations\.transformers"):
        _ = tikv.TikvCache


def test_type_checkers_and_python_are_told_the_same_names():
    import tikv

    source = pathlib.Path(tikv.__file__).read_text(encoding="utf-8")
    (block,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    )
    told = [(node.module, alias.name) for node in block.body for alias in node.names]
    assert all(alias.name == alias.asname for node in block.body for alias in node.names), "as a name of tikv's own"
    assert sorted(told) == sorted((home, name) for home, names in tikv._NAMES.items() for name in names)
    assert len(dict(told)) > 20
    assert set(dir(tikv)) == {"__version__", *(name for _, name in told)}


def test_import_starts_no_thread_and_opens_no_socket():
    child = run(
        "import sys\n"
        "events = []\n"
        "sys.addaudithook(lambda event, args: events.append(event) if event.startswith('socket.') else None)\n"
        "import threading, tikv\n"
        "print(threading.active_count(), events)"
    )
    assert child.stdout == "1 []\n"


def test_import_takes_at_most_150_ms_beyond_numpy_and_ml_dtypes():
    script = f"import time\n{BASELINE}\nstart = time.perf_counter()\nimport tikv\nprint(time.perf_counter() - start)"
    fastest = min(float(run(script).stdout) for _ in range(7))
    assert fastest <= 0.15
