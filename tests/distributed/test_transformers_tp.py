"""A transformers model cut over two processes (tensor parallelism), a `TikvCache` in each: the text of the whole."""

import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")
pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate", reason="transformers cuts models with it")


def run(folder, *arguments, **environment):
    script = pathlib.Path(__file__).with_name("parallel_llama.py")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(script.parents[1]), os.environ.get("PYTHONPATH", "")])
    child = subprocess.run(
        [*start, str(script), str(folder), *arguments], capture_output=True, text=True, timeout=400,
        env=os.environ | {"PYTHONPATH": path, **environment},
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    assert child.stdout.endswith("the same text\n")


@pytest.mark.full
def test_a_model_cut_over_two_processes_writes_what_the_whole_one_does(tmp_path):
    run(tmp_path, CUDA_VISIBLE_DEVICES="")  # else each process needs a GPU


@pytest.mark.archs("cuda")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_cut_over_two_gpus(arch, tmp_path):
    run(tmp_path, "cuda")
