"""Seconds of the first call of a kernel when nothing has been compiled before.

    python benches/first_call.py                  # on an NVIDIA GPU
    python benches/first_call.py --arch vulkan    # on Vulkan or a CPU, over arrays of the host
    python benches/first_call.py --model          # the first text of a model on a CPU, with and without tikv.warmup

Each kind of call has its own process and its own empty folders. The time does not include the start of Python, imports
and the making of arrays; on a GPU it includes the start of the process that compiles. Without a GPU, a second process
finds what the first one compiled, and the processor's time is shown too, which depends less on other programs.
"""

import argparse
import os
import sys
import tempfile
import time

import environment
import torch
from attention_gpu import Contiguous, Pages
from gpu import COMPILED, HEADS, WIDTH, Machine, Table, printed_by

import tikv
from tikv import launch

KEPT = ("TI_OFFLINE_CACHE_FILE_PATH", "QD_OFFLINE_CACHE_FILE_PATH", "MESA_SHADER_CACHE_DIR")  # between two processes
MODEL = 8, 1024, 16, 8, 64  # layers, width, heads, KV heads, width of a head


class Host(Machine):
    """A CPU, or Vulkan over arrays of the host."""

    def __init__(self, arch):
        self.small, self.on_gpu, self.device = True, False, "cpu"
        self.like = {"device": self.device, "dtype": torch.float16}
        tikv.init(arch)
        torch.manual_seed(0)


def append(machine):
    """A token into a store."""
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, capacity=256)
    rows = [machine.randn(1, HEADS, WIDTH) for _ in "kv"]
    return lambda: store.append(0, *rows)


def attend(machine, kind, new=1, chosen=0):
    """Queries over float16."""
    storage, q = kind(machine, 1, 256), machine.randn(1, 4 * HEADS, new, WIDTH)
    caches = [machine.randn(*storage.shape) for _ in "kv"]
    indices = torch.arange(chosen, device=machine.device)[None, None].int() if chosen else None
    return lambda: storage.call(q, caches, indices=indices)


CASES = {
    "append of a token": append,
    "attention of a token, contiguous": lambda machine: attend(machine, Contiguous),
    "attention of a token, pages of 16": lambda machine: attend(machine, Pages),
    "attention of 128 new tokens, contiguous": lambda machine: attend(machine, Contiguous, new=128),
    "attention of a token over chosen tokens": lambda machine: attend(machine, Contiguous, chosen=64),
}


def measured(machine, case):
    """Print the seconds of the first call, of the processor for it, and of the second, and how many were compiled."""
    call, seconds, kernels, spent = CASES[case](machine), [], [], [time.process_time()]
    with launch.notice.heard_by(kernels.append):
        for _ in range(2):
            start = time.perf_counter()
            call()
            if machine.on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            spent.append(time.process_time())
    print(seconds[0], spent[1] - spent[0], seconds[1], len(kernels))


def text(how):
    """Print the seconds until a model has written 8 tokens, of `tikv.warmup` in it, and of this process."""
    from generate_cpu import CACHE, model_of
    from transformers import LlamaConfig

    from tikv.integrations.transformers import TikvCache

    tikv.init("cpu")
    layers, width, heads, kv_heads, head_dim = MODEL
    start, spent = time.perf_counter(), time.process_time()
    if how != "none":
        config = LlamaConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
            head_dim=head_dim, attn_implementation="tikv",
        )  # fmt: skip
        tikv.warmup(TikvCache(config, dtype="int8"), tokens=(300, 1), quiet=True, wait=how == "wait")
    warm = time.perf_counter() - start
    model = model_of(*MODEL)
    model.set_attn_implementation("tikv")
    made = time.perf_counter() - start - warm
    ids = torch.ones((1, 300), dtype=torch.int64)
    model.generate(ids, max_new_tokens=8, do_sample=False, **{CACHE: TikvCache(model.config, dtype="int8")})
    print(time.perf_counter() - start, warm, made, time.process_time() - spent)


def twice(command):
    """The numbers that a program prints as its last line, with nothing on disk, and again in a second process."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update({name: os.path.join(folder, name) for name in KEPT})
        return [list(map(float, printed_by(command).splitlines()[-1].split())) for _ in range(2)]


def on_host(arch):
    """The table of a CPU or of Vulkan."""
    table = Table(
        "call, float16", "first call, s", "processor", "in a later process, s", "processor", "kernels compiled"
    )
    for case in CASES:
        with table.attempt(case):
            first, later = twice([__file__, "--arch", arch, "--case", case])
            table.row(case, *first[:2], *later[:2], f"{first[3]:.0f}")


def of_model():
    """The table of a model's first text."""
    table = Table(
        "8 tokens after a prompt of 300, int8", "s", "in warmup", "making the model", "processor of the caller"
    )
    for title, how in (
        ("without tikv.warmup", "none"),
        ("after tikv.warmup(cache)", "wait"),
        ("after tikv.warmup(cache, wait=False), then the model is made", "behind"),
    ):
        with table.attempt(title):
            first, later = twice([__file__, "--text", how])
            table.row(title, *first)
            table.row(f"{title}, in a later process", *later)


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one case, also without a GPU")
    parser.add_argument("--arch", choices=("cuda", "cpu", "vulkan"), default="cuda", help="the back end (cuda)")
    parser.add_argument("--model", action="store_true", help="the first text of a model on a CPU")
    parser.add_argument("--case", choices=CASES, help="measure this case, in this process")
    parser.add_argument("--text", choices=("none", "wait", "behind"), help="write a text in this process")
    given = parser.parse_args()
    if given.text:
        text(given.text)
        return
    if given.case:
        measured(Machine(given.small) if given.arch == "cuda" else Host(given.arch), given.case)
        return
    found = "cuda" if torch.cuda.is_available() else "cpu"
    print(environment.line(environment.environment([found if given.arch == "cuda" else given.arch])))
    if given.model:
        of_model()
        return
    if given.arch != "cuda":
        on_host(given.arch)
        return
    table = Table("call, float16", "first call, s", "second, ms", "kernels compiled")
    for case in list(CASES)[: 1 if given.small else None]:
        with table.attempt(case):
            printed = printed_by([__file__, *sys.argv[1:], "--case", case], COMPILED)
            first, _, second, kernels = printed.splitlines()[-1].split()
            table.row(case, float(first), float(second) * 1e3, kernels)


if __name__ == "__main__":
    main()
