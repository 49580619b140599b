"""The Metal source of every kernel is generated, validated and run, on any Linux machine with a Vulkan driver."""

import ast
import json
import os
import pathlib
import re
import subprocess
import sys

import metal_calls
import metal_comparison
import numpy as np
import oracle
import pytest
from metal_on_cpu import Options

import tikv
from tikv.launch import ahead

KERNELS = pathlib.Path(tikv.__file__).parent / "kernels"
pytestmark = pytest.mark.once
FLOAT_ADD, FLOAT_MAX = 350, 358


def factories():
    """The functions in kernels/ that return a kernel for Metal: `@ti.kernel` stands in them, or in what they call."""
    calls, defining = {}, set()
    for path in sorted(KERNELS.rglob("*.py")):
        if {"cpu", "cuda", "sm80", "sm90"} & {*path.relative_to(KERNELS).parts} or re.fullmatch(
            r"\w+_(cpu|cuda)", path.stem
        ):
            continue  # never on Metal
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            inside = list(ast.walk(node))
            named = [n for n in inside if isinstance(n, ast.FunctionDef)]
            if any(ast.unparse(d) == "ti.kernel" for inner in named for d in inner.decorator_list):
                defining.add(node.name)
            calls[node.name] = {n.func.id for n in inside if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    shared = {name for name in defining if any(name in called for called in calls.values())}
    found = defining - shared | {name for name, called in calls.items() if called & shared}
    found |= {name for name, called in calls.items() if called & found}
    return {name for name in found if not name.endswith("_cpu")}


@pytest.mark.thorough
@pytest.mark.parametrize("group", metal_calls.GROUPS)
def test_every_kernel_is_one_valid_metal_function(group, made):
    """One task a kernel; valid SPIR-V; Metal source without a double or an atomic float."""
    folder, kernels = made(group)
    assert kernels
    shaders = sorted(folder.glob("*.spv"))
    assert 0 < len(shaders) <= len(kernels), "one each, but for those that compile to the same code"
    for shader in shaders:
        assert shader.stem.endswith("_t00"), f"{shader.name}: a second task is a second launch"
        declared = shader.with_suffix(".declared")  # as `tikv export` has it
        declared.write_bytes(ahead.with_capabilities(shader.read_bytes()))
        assert ahead.is_valid(declared)
        metal = ahead.metal_of(shader)
        assert metal.count("kernel void ") == 1
        assert not re.search(r"\bdouble\b|atomic_float|atomic<float>", metal), shader.name


def compare(group, every, made, clang, environment):
    """Launch all kernels of a group of calls with each of these `Options`; what they compute is what the CPU does."""
    folder, kernels = made(group)
    assert kernels
    child = subprocess.run(
        [sys.executable, metal_comparison.__file__, folder, clang, group, *(json.dumps(o._asdict()) for o in every)],
        capture_output=True, text=True, env=environment, timeout=600,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    lines = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    for options, found in zip(every, lines, strict=True):
        assert found["calls"] > 0
        assert found["wrong"] == [], options
        assert sorted(found["launched"]) == sorted(kernel["name"] for kernel in kernels), options


@pytest.mark.thorough
@pytest.mark.full(unless=lambda case: case["group"] not in ("attention", "scattered"))  # the largest
@pytest.mark.parametrize("group", metal_calls.GROUPS)
def test_every_kernel_computes_on_metal_what_it_does_on_the_cpu(group, made, clang, vulkan):
    """Bit for bit, its threads in another order; attention, whose sums have another order, within its tolerance."""
    compare(group, [Options(32, seed=3)], made, clang, vulkan)


@pytest.mark.full
@pytest.mark.parametrize("group", ["fused", "wide_norms", "attention"])
def test_simd_groups_may_have_any_width(group, made, clang, vulkan):
    """Which matters to kernels whose threads share a row; with subnormals as zeros too."""
    compare(group, [Options(32), Options(16, seed=1, flush=True), Options(64, seed=2)], made, clang, vulkan)


@pytest.mark.full
@pytest.mark.parametrize("group", ["fused", "wide_norms"])
def test_norms_and_rotations_keep_their_bits_under_fast_math(group, made, clang, vulkan):
    """Which Metal's compiler assumes, and Taichi does not tell it otherwise."""
    compare(group, [Options(fast_math=True)], made, clang, vulkan)


def run_on_metal(vulkan, root, options, *arguments, timeout):
    """What pytest prints of the project's own tests on Metal."""
    path = os.pathsep.join([vulkan["PYTHONPATH"], str(root / "tests" / "kernels")])
    command = ["-p", "metal_on_cpu.plugin", "--arch", "metal", "--metal", json.dumps(options)]
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *command, *arguments],
        capture_output=True, text=True, env={**vulkan, "PYTHONPATH": path}, cwd=root, timeout=timeout,
    )  # fmt: skip
    assert child.returncode == 0, child.stdout[-3000:]
    assert re.search(r"^metal: (\d+ left for --full, )?\d+ passed$", child.stdout, re.MULTILINE), child.stdout
    return child.stdout


@pytest.mark.full
def test_the_projects_tests_run_on_metal(clang, vulkan, request):
    root = request.config.rootpath
    shown = run_on_metal(vulkan, root, {"simd_width": 16, "seed": 1}, root / "tests" / "test_smoke.py", timeout=300)
    ran = re.search(r"simd_width=16, seed=1.*: (\d+) kernels, \d+ launches", shown)
    assert int(ran[1]) > 1, shown


@pytest.mark.full
def test_formats_keep_their_bits_where_subnormals_are_zeros(clang, vulkan, request):
    """As on Apple's GPUs, and on CUDA under Taichi, whose kernels come from the same source."""
    root = request.config.rootpath
    named = ["-k", "nvfp4 or int8 or quant4_64 or hadamard or float8"]
    run_on_metal(vulkan, root, {"flush": True}, root / "tests" / "ops" / "test_extremes.py", *named, timeout=600)


def test_a_result_that_differs_is_noticed():
    exact = np.float16([1, 2, 3])
    assert metal_comparison.difference(exact, exact, True) is None
    assert "1 of 3 elements differ" in metal_comparison.difference(oracle.flip_bit(exact, 1), exact, True)
    near = np.float32([1, 2, 3])
    assert metal_comparison.difference(near * np.float32(1 + 1e-5), near, False) is None
    assert "differs by" in metal_comparison.difference(near * np.float32(1 + 4e-5), near, False)
    near[1] = np.nan
    assert "differs by nan" in metal_comparison.difference(near, exact.astype(np.float32), False)


@pytest.mark.thorough
def test_norms_and_rotations_are_not_fused(made):
    """No product of theirs is left to be rounded together with a sum, here and in CUDA's code from the same source.

    Taichi's SPIR-V says Fma where a product is added. Two are left alone: squares of float16, which need no rounding,
    and sums with a constant, which round an approximation or follow a division by a power of 2.
    """
    folder, _ = made("fused")
    sums = 0
    for shader in sorted(folder.glob("*.spv")):
        listed = subprocess.run(
            ["spirv-dis", "--raw-id", shader], capture_output=True, text=True, timeout=60, check=True
        )
        defined = {m[1]: (m[2], m[3].split()) for m in re.finditer(r"(%\d+) = (Op\w+) ?(.*)", listed.stdout)}

        def kind(register, defined=defined):
            return defined[register][0]

        for what, operands in defined.values():
            sums += what in ("OpFAdd", "OpFSub")
            if what in ("OpFAdd", "OpFSub"):
                assert "OpFMul" not in map(kind, operands[1:]), f"{shader.name}: {what} {operands}"
            if what == "OpExtInst" and operands[2] == "Fma":
                x, y, added = operands[3:]
                square = x == y and kind(x) == "OpFConvert"
                assert square or kind(added) == "OpConstant", f"{shader.name}: {what} {operands}"
    assert sums


def may_be_skipped(line, at):
    """Whether what stands there in a line of Metal source is evaluated on a condition: behind a ?, && or ||."""
    open_ = [False]
    for n, letter in enumerate(line[:at]):
        if letter == "(":
            open_.append(False)
        elif letter == ")":
            open_.pop()
        elif letter == "?" or line[n : n + 2] in ("&&", "||"):
            open_[-1] = True
    return any(open_)


def test_what_is_evaluated_on_a_condition_is_seen():
    assert may_be_skipped("a = c ? simd_sum(b) : d;", 8)
    assert may_be_skipped("a = c ? e : (f + simd_sum(b));", 17)
    assert may_be_skipped("a = (c || d) && simd_sum(b);", 16)
    assert not may_be_skipped("a = (c ? 1 : 0) & simd_sum(b);", 18)


@pytest.mark.thorough
def test_attention_reduces_over_simd_groups(made):
    """By SPIR-V's operations, and in Metal by sums and maxima that all threads of a SIMD group take part in."""
    folder, kernels = made("attention")
    shaders = sorted(folder.glob("attend_*.spv"))
    assert len(shaders) == sum(kernel["factory"].startswith("make_attend_block") for kernel in kernels) > 0
    for shader in shaders:
        assert {FLOAT_ADD, FLOAT_MAX} <= ahead.operations_of(shader.read_bytes()), shader.name
        metal = ahead.metal_of(shader)
        for name in ("simd_sum(", "simd_max("):
            assert name in metal, f"{shader.name}: no {name}"
        for line in metal.splitlines():
            for use in re.finditer(r"\bsimd_", line):
                assert not may_be_skipped(line, use.start()), f"{shader.name}: {line.strip()}"


@pytest.mark.thorough
def test_no_factory_is_left_out(made):
    """A new kernel needs a call in metal_calls.py."""
    groups = [group for group in metal_calls.GROUPS if group != "attention_in_parts"]
    seen = {kernel["factory"] for group in groups for kernel in made(group)[1]}
    assert seen == factories()
