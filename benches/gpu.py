"""What the programs for an NVIDIA GPU share: device times, checks of results, tables, and the command line.

The L2 cache is flushed before each call, and the host queues the call while the device sleeps. A time is the median of
16 calls. Without a GPU, `--small` runs each program on the CPU, once for each figure, to see that it works.
"""

import argparse
import contextlib
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time

import environment
import torch

import tikv

# What keeps what was compiled before: first calls are timed without.
COMPILED = (
    "TIKV_CACHE_DIR",
    "TI_OFFLINE_CACHE_FILE_PATH",
    "CUDA_CACHE_PATH",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
)
HEADS, WIDTH, PAGE, ROUNDS = 8, 128, 16, 16  # of K and V; tokens of a page; calls that are timed
CHECKED = 64  # queries of a prompt whose results are compared


class Machine:
    """Where calls are timed. With `small`, it is the CPU if there is no GPU."""

    def __init__(self, small, **options):
        self.small, self.on_gpu = small, torch.cuda.is_available()
        if not self.on_gpu and not small:
            raise SystemExit("no NVIDIA GPU was found; --small runs tiny sizes on the CPU")
        self.device = "cuda" if self.on_gpu else "cpu"
        tikv.init(self.device, **options)
        self.most_error = 0.05 if options.get("attention_bits") == 8 else 2e-3  # of a result's norm
        torch.manual_seed(0)
        self.like = {"device": self.device, "dtype": torch.float16}
        self._flushed = torch.empty(256 << 20 if self.on_gpu else 1, dtype=torch.uint8, device=self.device)

    def randn(self, *shape):
        """Float16 numbers."""
        return torch.randn(shape, **self.like)

    def lens(self, batch, length):
        """The lengths of sequences, on the device."""
        return torch.full((batch,), length, dtype=torch.int32, device=self.device)

    def us(self, *calls):
        """The median device time of a call in microseconds; calls that differ in their arrays alternate."""
        for call in calls:
            call()
        times = []
        for i in range(1 if self.small else ROUNDS):
            call = calls[i % len(calls)]
            times.append(self._on_the_device(call, i) if self.on_gpu else self._here(call))
        return statistics.median(times)

    def _on_the_device(self, call, turn):
        torch.cuda.synchronize()
        self._flushed.fill_(turn & 1)
        torch.cuda._sleep(1_000_000)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3

    @staticmethod
    def _here(call):
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6

    def peer_us(self, *calls):
        """The same for a peer, or its error if it cannot do this."""
        try:
            return self.us(*calls)
        except RuntimeError as error:
            return reason(error).replace("failed", "refused")

    @functools.cached_property
    def read_rate(self):
        """GB/s of reading 1 GiB by torch's sum."""
        numbers = torch.rand((1 << 18) if self.small else (1 << 28), device=self.device)
        return numbers.nbytes / self.us(numbers.sum) / 1e3


class Table:
    """Rows of figures. One that cannot be measured says why in its place, and the rows after it are measured."""

    def __init__(self, *columns):
        self._columns = len(columns)
        print(f"\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}", flush=True)

    def row(self, *cells):
        """Print a row: text, or figures, of which three digits, or all before the point, are shown."""
        shown = [cell if isinstance(cell, str) else number(cell) for cell in cells]
        shown += [""] * (self._columns - len(shown))
        print(f"| {' | '.join(shown)} |", flush=True)

    @contextlib.contextmanager
    def attempt(self, *cells):
        """Whatever goes wrong within becomes a row that begins with these cells."""
        try:
            yield
        except Exception as error:
            self.row(*cells, reason(error))


def number(value):
    """As a table shows it: 1,234 and 12.3 and 1.23."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def ratio(a, b):
    """How many times b goes into a; nothing where one of them is a reason."""
    return "" if isinstance(a, str) or isinstance(b, str) else f"{a / b:.2f}"


def reason(error):
    """Why a figure is missing, as a cell has it."""
    lines = str(error).strip().splitlines() or [""]
    return f"failed: {type(error).__name__}: {lines[0][:80]}".replace("|", "/")


def check(out, want, most=2e-3):
    """Fail where a result is not what it has to be, by the norm of the difference."""
    error = ((out.double() - want.double()).norm() / want.double().norm()).item()
    assert error < most, f"the result differs by {error:.1e} of its norm"


def check_attention(out, q, k, v, seen=None, most=2e-3):
    """Fail unless queries (Hq, T, D) of a sequence have what float64 gives of its K and V (H, S, D).

    `seen` (T, S) says which keys each sees, by default those up to its own. Of a long prompt some queries are compared.
    """
    new, keys = q.shape[1], k.shape[1]
    some = torch.linspace(0, new - 1, min(new, CHECKED)).long().to(q.device)
    if seen is None:
        seen = torch.arange(keys, device=q.device) <= keys - new + torch.arange(new, device=q.device)[:, None]
    grouped = q[:, some].double().unflatten(0, (k.shape[0], -1))
    scores = grouped @ k.double().transpose(-1, -2)[:, None] * q.shape[-1] ** -0.5
    weights = torch.softmax(scores.masked_fill(~seen[some], -torch.inf), dim=-1)
    check(out[:, some], (weights @ v.double()[:, None]).flatten(0, 1), most)


def printed_by(command, folders=(), within=None):
    """What a Python process printed; with a folder for each of these environment variables, if any.

    They are empty, unless a folder is given `within` which they lie, perhaps since an earlier process.

    Raises:
        RuntimeError: it failed; its last words say why.
    """
    with tempfile.TemporaryDirectory() as empty_folder:
        empty = {name: os.path.join(within or empty_folder, name) for name in folders}
        child = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, check=False, env={**os.environ, **empty}
        )
    if child.returncode:
        raise RuntimeError((child.stderr.strip() or f"exit status {child.returncode}").splitlines()[-1])
    return child.stdout


def started(text, what, formats=()):
    """(what is asked for, the machine), with the environment printed; `text` is the program's docstring.

    A program over formats has those that are asked for in the machine's `formats`.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(what))
    parser.add_argument("--small", action="store_true", help="tiny sizes, once each, also without a GPU")
    if formats:
        parser.add_argument("--formats", nargs="+", choices=formats, help="formats beside float16 (all)")
        parser.add_argument("--attention-bits", type=int, default=16, choices=(16, 8), help="as of tikv.init (16)")
    given = parser.parse_args()
    machine = Machine(given.small, **({"attention_bits": given.attention_bits} if formats else {}))
    machine.formats = (given.formats or formats) if formats else ()
    print(environment.line(environment.environment([machine.device])), flush=True)
    return given.what, machine
