"""What is installed, what works, and why something does not: `info`, and `doctor`, which runs real operations.

Each back end is tried in a process of its own, so that a driver that crashes only costs a line of the report. It is
tried twice, with a kernel cache on disk that is empty at first, to measure how long first calls take.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from tikv import engines, launch, runtime
from tikv.errors import TikvError
from tikv.launch.cuda import made
from tikv.ops.attention import torch_sdpa

VERSION: str = sys.modules["tikv"].__version__
PACKAGES = (
    *engines.ALL,
    "numpy",
    "ml_dtypes",
    "safetensors",
    "torch",
    "mlx",
    "transformers",
    "cuda-bindings",
    "rich",
    "matplotlib",
)
REMEDIES = {
    "metal": "Metal needs macOS on Apple silicon.",
    "cuda": "Install NVIDIA's driver; `nvidia-smi` must list a GPU.",
    "vulkan": "Install a Vulkan driver and loader (Debian: mesa-vulkan-drivers libvulkan1).",
    "amdgpu": "tikv was never run on amdgpu, which needs engine='quadrants' and AMD's driver (ROCm).",
    "cpu": " Or: ".join(engine.remedy for engine in engines.ALL.values()),
}

_VARIABLES = ("TIKV_", *(f"{engine.alias.upper()}_" for engine in engines.ALL.values()))


def info() -> dict[str, Any]:
    """Versions, back end, device, memory and launcher, as a dictionary for JSON. Starts nothing.

    The keys ``arch``, ``device`` and ``memory_bytes`` describe the running engine, or the one that "auto" would start;
    ``arch_why`` says why. ``engine`` is "taichi", "quadrants", or "none" if neither can be used, and ``engine_why``
    says why. ``invariant`` and ``attention_bits`` are the values given to `init`. ``tensor_cores`` is "in use", or
    says why attention on CUDA does not use them. ``warpgroups`` says the same for attention over prompts and latents on
    compute capability 9, and ``subgroups`` for Vulkan and Metal, where the first call of attention finds out whether
    they work. ``place_host`` says what a store with ``place="host"`` gets: "offered", "plain: " and why, or "refused: "
    and why. ``made_kernels`` names files of kernels made beforehand for CUDA. ``attention_auto`` says for which calls
    of each measured kind ``impl="auto"`` takes torch's attention instead of tikv's, and why.

    Examples:
        >>> import tikv
        >>> sorted(tikv.info())[:3]
        ['arch', 'arch_order', 'arch_why']
    """
    order = runtime.candidate_archs()
    live = runtime.running()
    arch = live.arch if live is not None else order[0]
    engine = runtime.engine_report()
    return {
        "version": VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: runtime.version_of(name) for name in PACKAGES},
        "engine": engine["engine"],
        "engine_why": engine["why"],
        "arch": arch,
        "arch_why": live.why_arch if live is not None else runtime.why_auto(),
        "arch_order": order,
        "started": live is not None,
        "epoch": live.epoch if live is not None else 0,
        "debug": live.debug if live is not None else False,
        "invariant": live.invariant if live is not None else False,
        "attention_bits": live.attention_bits if live is not None else 16,
        "device": runtime.device_name(arch),
        "memory_bytes": runtime.memory_bytes(arch),
        "vulkan_devices": [{"name": name, "kind": kind} for name, kind in runtime.vulkan_devices()],
        "launcher": launch.launcher_report(live)
        if live is not None
        else {"launcher": "none yet", "why": f"{engine['title']} has not started"},
        "made_kernels": made_kernels(),
        "tensor_cores": _in_use(live, launch.why_no_tensor_cores),
        "warpgroups": _in_use(live, launch.why_no_warpgroups),
        "subgroups": launch.subgroup_report(live) if live is not None else "not started",
        "place_host": _place_host(live) if live is not None else "not started",
        "attention_auto": torch_sdpa.report(live) if live is not None else "not started",
        "environment": {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)},
    }


def made_kernels() -> str:
    """Which files of kernels made beforehand for CUDA this process uses; or why not."""
    return made.report()


def _in_use(live: runtime.Runtime | None, why_not: Callable[[runtime.Runtime], str]) -> str:
    if live is None:
        return "not started"
    known = not launch.why_no_bitcode(live)
    return why_not(live) or ("in use" if known else "in use, if a kernel was made beforehand")


def _place_host(live: runtime.Runtime) -> str:
    from tikv.stores.layers.residents import host_report  # a slow import: it brings all that stores need

    return host_report(live)


@dataclass(frozen=True)
class Check:
    """The outcome of one back end: "PASS", "FAIL" or "absent", and why.

    Attributes:
        arch: the back end.
        status: "PASS", "FAIL" or "absent".
        detail: what was compared, and on which device; or why it did not work.
        seconds: the time of the comparisons and of the engine's start.
        remedy: what to do, unless it passed.
        first_calls: the shortest and the longest first call of a kind of kernel, in seconds, with compilation.
        later_calls: the same in another process, which finds the kernels on disk.
        parts: the seconds of each of `PARTS` for all first calls, with compilation; an engine that compiles in another
            process, as on CUDA, has fewer.
        later_parts: the same in another process.
    """

    arch: str
    status: str
    detail: str
    seconds: float
    remedy: str = ""
    first_calls: tuple[float, float] | None = None
    later_calls: tuple[float, float] | None = None
    parts: dict[str, float] | None = None
    later_parts: dict[str, float] | None = None


PARTS = {
    "start": "starting the engine",
    "read": "reading the kernels' source",
    "compile": "compiling them",
    "load": "loading them, and first runs",
}


_PROBE = """
import json, sys, time
start = time.perf_counter()
import numpy as np, ml_dtypes, tikv
from tikv import reference
arch = sys.argv[1]
try:
    live = tikv.init(arch)
except tikv.ArchError as error:
    print(json.dumps({"status": "absent", "detail": str(error).split(". ")[0]}))
    raise SystemExit
parts = {"start": time.perf_counter() - start, "load": 0.0}
rng = np.random.default_rng(0)
done, took = [], []
def first_call(call, **given):
    begin = time.perf_counter()
    found = call(**given)
    live.synchronize()
    seconds = time.perf_counter() - begin
    parts["load"] += seconds
    if seconds > 0.03:  # else it found the kernel of an earlier call
        took.append(seconds)
    return found
def compare(name, got, want):
    if not (np.ascontiguousarray(got).view(np.uint8) == np.ascontiguousarray(want).view(np.uint8)).all():
        print(json.dumps({"status": "FAIL", "detail": name + ": bits differ from the reference"}))
        raise SystemExit
    done.append(name)
for name, src_type, cache_type in (
    ("float32", np.float32, np.float32), ("float16", np.float16, np.float16),
    ("bfloat16", ml_dtypes.bfloat16, ml_dtypes.bfloat16), ("float32 to float16", np.float32, np.float16),
    ("float32 to bfloat16", np.float32, ml_dtypes.bfloat16)):
    src = rng.standard_normal((9, 3, 16)).astype(src_type)
    before = rng.standard_normal((3, 6, 16)).astype(cache_type)
    cache = before.copy()
    first_call(tikv.copy, src=src, cache=cache, position=4, window=5)
    compare("ring " + name, cache, reference.copy(src, before, position=4, window=5))
store = tikv.KVCacheStore(num_layers=2, num_kv_heads=2, head_dim=8, capacity=8, dtype="float32", window=[None, 4])
k = rng.standard_normal((2, 6, 2, 8)).astype(np.float32)
first_call(store.append_all, k=k, v=k)
compare("store", store.tokens(1)[0].copy_to_host()[0], k[1, 2:].transpose(1, 0, 2))
q = rng.standard_normal((1, 4, 8)).astype(np.float32)
got = np.asarray(first_call(store.attend, layer=0, q=q))
keys = k[0].transpose(1, 0, 2).repeat(2, axis=0)  # two query heads read one KV head
scores = np.einsum("hd,htd->ht", q[0], keys) / np.sqrt(8)
weights = np.exp(scores - scores.max(-1, keepdims=True))
want = np.einsum("ht,htd->hd", weights / weights.sum(-1, keepdims=True), keys)
if not np.allclose(got[0], want, rtol=0, atol=1e-5):
    print(json.dumps({"status": "FAIL", "detail": f"attention differs from NumPy by {abs(got[0] - want).max():.1e}"}))
    raise SystemExit
done.append("attention")
detail = f"{len(done)} comparisons, {tikv.runtime.device_name(arch)}"
if live.is_spirv:
    detail += f", subgroups: {tikv.launch.why_no_subgroups(live) or 'in use'}"
here = [kernel for kernel in live.kernels.values() if kernel.compiled is not None]
if here:
    parts["read"] = sum(kernel.seconds_read for kernel in here)
    parts["compile"] = sum(kernel.seconds_compiled for kernel in here)
    parts["load"] -= parts["read"] + parts["compile"]
print(json.dumps({"status": "PASS", "detail": detail, "seconds": time.perf_counter() - start,
                  "first_calls": [min(took), max(took)] if took else None, "parts": parts}))
"""


def check(arch: str, timeout: float = 180.0) -> Check:
    """Run real operations on one back end in a process of its own and compare the results with NumPy."""
    with tempfile.TemporaryDirectory(prefix="tikv-doctor-") as kernels:
        first = _probe(arch, timeout, kernels)
        if first.status == "PASS" and first.first_calls is not None:
            again = _probe(arch, timeout, kernels)
            if again.status != "PASS":
                return again
            return replace(first, later_calls=again.first_calls, later_parts=again.parts)
    return first


def _probe(arch: str, timeout: float, kernels: str) -> Check:
    """`check` once, with compiled kernels in a folder."""
    places = {engine.cache_variable: os.path.join(kernels, engine.name) for engine in engines.ALL.values()}
    try:
        child = subprocess.run(
            [sys.executable, "-c", _PROBE, arch],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, **places},
        )
    except subprocess.TimeoutExpired:
        return Check(arch, "FAIL", f"no answer within {timeout:.0f} s", timeout, REMEDIES[arch])
    lines = [line for line in child.stdout.splitlines() if line.startswith("{")]
    if not lines:
        last = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        return Check(arch, "FAIL", last, 0.0, REMEDIES[arch])
    answer = json.loads(lines[-1])
    times = answer.get("first_calls")
    return Check(
        arch,
        answer["status"],
        answer["detail"],
        answer.get("seconds", 0.0),
        "" if answer["status"] == "PASS" else REMEDIES[arch],
        None if times is None else (times[0], times[1]),
        parts=answer.get("parts"),
    )


def doctor(archs: tuple[str, ...] = runtime.ARCHS, step: Callable[[str, int], None] | None = None) -> list[Check]:
    """`check` for each back end, in the order in which "auto" looks.

    Args:
        archs: the back ends.
        step: called before each with its name, and how many are done.
    """
    checks = []
    for number, arch in enumerate(archs):
        if step is not None:
            step(arch, number)
        checks.append(check(arch))
    return checks


def exit_status(checks: list[Check]) -> int:
    """0 if the back end that "auto" would take passes and no back end fails."""
    default = runtime.candidate_archs()[0]
    broken = any(c.status == "FAIL" or (c.arch == default and c.status != "PASS") for c in checks)
    return 1 if broken else 0


def as_json(checks: list[Check]) -> str:
    """The checks as JSON."""
    return json.dumps([asdict(c) for c in checks], indent=2)


TESTED, REFUSED, FAILED, NOT_HERE = "tested", "not offered", "FAIL", "not on this machine"


@dataclass(frozen=True)
class Trial:
    """One operation in one dtype on one back end: "tested", "not offered", "FAIL" or "not on this machine", and why."""

    arch: str
    operation: str
    dtype: str
    status: str
    detail: str = ""


def support(archs: tuple[str, ...] = runtime.ARCHS, done: Callable[[Trial], None] | None = None) -> list[Trial]:
    """Run every operation in every dtype on each back end, in a process of its own, against the NumPy reference.

    Args:
        archs: the back ends.
        done: called with each trial as it ends.

    Returns:
        A trial for each operation and each dtype that it supports; a single trial for a back end that is not on this
        machine; one more with status "FAIL" if a process ended early.
    """
    trials: list[Trial] = []

    def add(trial: Trial) -> None:
        trials.append(trial)
        if done is not None:
            done(trial)

    for arch in archs:
        with tempfile.TemporaryFile("w+") as errors:
            command = [sys.executable, "-m", "tikv.tools.support", arch]
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            assert child.stdout is not None
            try:
                for line in child.stdout:
                    if not line.startswith("{"):
                        continue
                    message = json.loads(line)
                    if "absent" in message:
                        add(Trial(arch, "all", "all", NOT_HERE, message["absent"]))
                    else:
                        add(Trial(**message))
            except BaseException:
                child.kill()
                raise
            finally:
                child.stdout.close()
                child.wait()
            if child.returncode:
                errors.seek(0)
                last = (errors.read().strip().splitlines() or ["no message"])[-1]
                add(Trial(arch, "all", "all", FAILED, f"exit status {child.returncode}: {last}"))
    return trials


__all__ = ["Check", "TikvError", "as_json", "check", "doctor", "exit_status", "info", "support"]
