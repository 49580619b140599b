"""The native launcher's own logic, without a GPU: PTX rewritten, arguments laid out, kernels kept on disk, fallbacks.

`data/*.ptx` are what Taichi 1.7.4 generates for two copies. A stand-in for the driver records launches.
"""

import ctypes
import pathlib
import re
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tikv
from tikv import launch, runtime
from tikv.arrays import view
from tikv.launch.cuda import compiler, disk_cache, driver, ptx

DATA = pathlib.Path(__file__).parent / "data"
NAMES = ("copy", "cast")
ARGUMENT_BYTES = 232


def recorded(name):
    return (DATA / f"{name}.ptx").read_text()


# --- PTX


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_read_from_the_parameter(name, overlap):
    text = recorded(name)
    patched = ptx.patch(text, ARGUMENT_BYTES, overlap)
    assert text.count(".entry") == 2
    assert re.findall(r"\.entry (\w+)\(", patched.text) == [patched.entry]
    assert re.findall(r"\.param .*", patched.text) == [f".param .align 16 .b8 arguments[{ARGUMENT_BYTES}]"]
    assert patched.block == 128
    assert "_param_0" not in patched.text
    assert "cvta" not in patched.text
    read = [(kind, int(at)) for kind, at in re.findall(r"ld\.param\.(\w+) \t%\w+, \[arguments\+(\d+)\]", patched.text)]
    arrays = 4 if name == "copy" else 2
    assert {at for kind, at in read if kind == "u64"} == {8 + 16 * i for i in range(arrays)}
    assert read[0] == ("u32", 0), "the loop's bound is the first array's extent"
    before = set(re.findall(r"ld\.global\.\w+ \t%\w+, \[%rd2\+(\d+)\]", text))
    assert {str(at) for _, at in read} == before | {"0"}


@pytest.mark.parametrize("name", NAMES)
def test_words_are_moved_whole(name):
    text, patched = recorded(name), ptx.patch(recorded(name), ARGUMENT_BYTES).text
    halves = re.findall(r"\t(?:ld|st)\.[ubf]32 \t", text.split("range_for(")[1])
    words = re.findall(r"\t(?:ld|st)\.global\.v2\.b32 \t", patched)
    assert len(words) * 2 == len(halves) - 1, "all but the loop's bound"
    assert not re.search(r"\t(?:ld|st)\.[ubf]32 \t", patched)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_rewritten_text_assembles(name, overlap, tmp_path):
    assembler = shutil.which("ptxas")
    if assembler is None:
        pytest.skip("no ptxas here")
    (tmp_path / "kernel.ptx").write_text(ptx.patch(recorded(name), ARGUMENT_BYTES, overlap).text)
    subprocess.run([assembler, "-arch=sm_90", "kernel.ptx", "-o", "kernel.cubin"], cwd=tmp_path, check=True)


def test_a_kernel_waits_before_it_touches_memory():
    patched = ptx.patch(recorded("copy"), ARGUMENT_BYTES, overlap=True).text
    assert ".version 7.8" in patched
    assert ".target sm_90" in patched
    instructions = [line.strip() for line in patched.splitlines() if re.match(r"\t[a-z@]", line)]
    assert instructions[:2] == ["griddepcontrol.launch_dependents;", "griddepcontrol.wait;"]
    assert patched.count("griddepcontrol") == 2


SERIAL_STORE = "\tst.u32 \t[%rd5], %r1;\n"
REFUSED = {
    "a third entry": lambda t: t + t[t.index(".visible") : t.index("}") + 2].replace("_0_serial", "_2_serial"),
    "a runtime function": lambda t: t.replace(".visible", ".extern .func taichi_printf();\n.visible", 1),
    "shared memory of no size": lambda t: t.replace(".visible", ".extern .shared .align 8 .b8 s[];\n.visible", 1),
    "a first entry that does more": lambda t: t.replace(SERIAL_STORE, SERIAL_STORE + "\tst.u32 \t[%rd5+4], %r1;\n"),
    "the bound put elsewhere": lambda t: t.replace("+32872", "+32880", 1),
    "the arguments' address kept": lambda t: t.replace(
        "\tmov.b32 \t%f1", "\tadd.s64 \t%rd46, %rd2, %rd9;\n\tmov.b32 \t%f1"
    ),
    "the runtime used": lambda t: t.replace("\tld.param.u64 \t%rd7, [%rd1];", "\tld.param.u64 \t%rd7, [%rd1+8];"),
    "another parameter": lambda t: t.replace("_param_0[32]", "_param_0[40]"),
    "no fixed block": lambda t: t.replace(".maxntid 128, 1, 1", ""),
    "two axes of threads": lambda t: t.replace(".maxntid 128, 1, 1", ".maxntid 64, 2, 1"),
    "arguments out of bounds": lambda t: t.replace("[%rd2+160]", f"[%rd2+{ARGUMENT_BYTES}]"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_an_unknown_form_is_refused(change):
    text = recorded("cast")
    changed = REFUSED[change](text)
    assert changed != text
    with pytest.raises(ptx.Unpatchable):
        ptx.patch(changed, ARGUMENT_BYTES)


def test_shared_arrays_get_their_room():
    text = recorded("copy").replace(".visible", ".extern .shared .align 8 .b8 shared_array_1[512];\n.visible", 1)
    assert "\n.shared .align 8 .b8 shared_array_1[512];\n" in ptx.patch(text, ARGUMENT_BYTES).text


def test_strict_arithmetic_rounds_each_step():
    body = """{
\tfma.rn.ftz.f32 \t%f1, %f2, %f3, 0f3F800000;
\tmul.ftz.f32 \t%f4, %f1, %f2;
\tadd.f64 \t%fd1, %fd2, %fd3;
\tcvt.ftz.f32.f16 \t%f5, %h1;
\trsqrt.approx.ftz.f32 \t%f6, %f5;
\tdiv.full.ftz.f32 \t%f7, %f6, %f5;
\tsetp.lt.ftz.f32 \t%p1, %f6, %f5;
\tadd.s32 \t%r1, %r2, %r3;
}"""
    assert ptx._strict(body).split("\n") == [
        "{",
        "\t.reg .f32 \t%exact32;",
        "\tmul.rn.f32 \t%exact32, %f2, %f3;",
        "\tadd.rn.f32 \t%f1, %exact32, 0f3F800000;",
        "\tmul.rn.f32 \t%f4, %f1, %f2;",
        "\tadd.rn.f64 \t%fd1, %fd2, %fd3;",
        "\tcvt.f32.f16 \t%f5, %h1;",
        "\tsqrt.rn.f32 \t%exact32, %f5;",
        "\trcp.rn.f32 \t%f6, %exact32;",
        "\tdiv.rn.f32 \t%f7, %f6, %f5;",
        "\tsetp.lt.f32 \t%p1, %f6, %f5;",
        "\tadd.s32 \t%r1, %r2, %r3;",
        "}",
    ]


def test_an_address_further_into_the_arguments_is_followed():
    text = recorded("cast").replace(
        "\tmov.b32 \t%f1,", "\tadd.s64 \t%rd99, %rd2, 120;\n\tld.global.u64 \t%rd98, [%rd99+8];\n\tmov.b32 \t%f1,"
    )
    patched = ptx.patch(text, ARGUMENT_BYTES).text
    assert "\tld.param.u64 \t%rd98, [arguments+128];" in patched
    assert "%rd99" not in patched


WORD = """{
\tld.param.u64 \t%rd1, [arguments+8];
\tmul.wide.s32 \t%rd2, %r1, 8;
\tadd.s64 \t%rd3, %rd1, %rd2;
\tld.u32 \t%rd4, [%rd3];
BETWEEN\tld.u32 \t%rd5, [%rd3+4];
}"""


def test_halves_are_joined():
    joined = ptx._whole_words(WORD.replace("BETWEEN", ""))
    assert "\tld.global.v2.b32 \t{%half0, %half1}, [%rd3+0];" in joined
    assert joined.count("ld.") == 2


ELEMENT = "{\n\tshr.u64 \t%rd2, %rd1, 32;\nBETWEEN\tcvt.u16.u64 \t%rs1, %rd2;\n"


def test_elements_are_parts_of_registers():
    taken = ptx._quarters(ELEMENT.replace("BETWEEN", ""))
    assert "{%quarter0, %quarter1, %quarter2, %quarter3}, %rd1;\n\tmov.b16 \t%rs1, %quarter2;" in taken
    assert "cvt" not in taken
    assert ".reg .b16 \t%quarter<4>;" in taken


@pytest.mark.parametrize(
    "between",
    ["\tmov.u64 \t%rd1, %rd7;\n", "\tadd.s64 \t%rd2, %rd2, 1;\n", "$L__BB0_3:\n", "\t@%p1 bra \t$L__BB0_4;\n"],
    ids=["the word changes", "the shifted word changes", "a label", "a branch"],
)
def test_elements_of_words_that_may_have_changed_are_left(between):
    text = ELEMENT.replace("BETWEEN", between)
    assert ptx._quarters(text) == text


@pytest.mark.parametrize(
    "text",
    [
        WORD.replace("BETWEEN", "").replace("%r1, 8;", "%r1, 4;"),
        WORD.replace("BETWEEN", "").replace("ld.param.u64 \t%rd1, [arguments+8]", "mov.u64 \t%rd1, %rd9"),
        WORD.replace("BETWEEN", "").replace("[%rd3+4]", "[%rd3+8]"),
        WORD.replace("BETWEEN", "")
        .replace("[%rd3]", "[%rd3+4]")
        .replace("ld.u32 \t%rd5, [%rd3+4]", "ld.u32 \t%rd5, [%rd3+8]"),
        WORD.replace("BETWEEN", "\tst.u32 \t[%rd3+4], %r7;\n"),
        WORD.replace("BETWEEN", "$L__BB0_1:\n"),
        WORD.replace("BETWEEN", "\tbar.sync \t0;\n"),
        WORD.replace("BETWEEN", "\tadd.s64 \t%rd6, %rd5, 1;\n"),
        WORD.replace("BETWEEN", "\tadd.s64 \t%rd3, %rd3, 8;\n"),
    ],
    ids=["not words", "not an array", "other words", "across words", "store", "label", "barrier", "used", "moved on"],
)
def test_halves_that_may_not_be_joined_are_left(text):
    assert ptx._whole_words(text) == text


# --- arguments


@given(st.lists(st.sampled_from(["array", "number", *range(1, 33)]), min_size=1, max_size=12))
def test_arguments_lie_as_a_c_compiler_lays_them(kinds):
    class Array(ctypes.Structure):
        _fields_ = [("extent", ctypes.c_int32), ("pointer", ctypes.c_uint64)]

    def field(kind):
        return Array if kind == "array" else ctypes.c_int32 if kind == "number" else ctypes.c_int32 * kind

    names = [f"a{i}" for i in range(len(kinds))]
    natural = type(
        "Natural", (ctypes.Structure,), {"_fields_": [(n, field(k)) for n, k in zip(names, kinds, strict=True)]}
    )
    words = ["u64" if kind == "array" else None for kind in kinds]
    offsets, size = launch.argument_layout(words, [kind if isinstance(kind, int) else 0 for kind in kinds])
    assert offsets == [getattr(natural, name).offset for name in names]
    assert size == -(-ctypes.sizeof(natural) // 8) * 8


@given(st.integers(1, 2**31 - 1), st.sampled_from([32, 128, 256]), st.integers(1, 1 << 20))
def test_a_stride_never_leaves_32_bits(iterations, block, most):
    try:
        blocks = launch.blocks_of(iterations, block, most, "example")
    except tikv.CapacityError:
        assert iterations + block > 2**31 - 1
        return
    assert 1 <= blocks <= most
    assert iterations + blocks * block <= 2**31 - 1
    assert blocks * block < iterations + block


class Recorder:
    """Stands in for cuda.bindings.driver: keeps the argument bytes of each launch."""

    CUresult = types.SimpleNamespace(CUDA_SUCCESS=0)

    def __init__(self):
        self.launched = []
        self.size = 0
        self.failures = []

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        if self.failures:
            return (self.failures.pop(0),)
        address = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0]
        self.launched.append((function, config.hStream, ctypes.string_at(address, self.size)))
        return (0,)


class Refused(int):
    name = "CUDA_ERROR_INVALID_CONTEXT"


@pytest.fixture
def recorder(monkeypatch):
    found = Recorder()
    entered = types.SimpleNamespace(multiprocessors=4, overlaps=False, enter=lambda: None, target="sm_90")
    monkeypatch.setattr(driver, "binding", lambda: found)
    monkeypatch.setattr(driver, "device", lambda: entered)
    monkeypatch.setattr(driver, "stream_object", lambda handle: handle)
    monkeypatch.setattr(
        driver, "launch_config", lambda blocks, block: types.SimpleNamespace(blocks=blocks, block=block, hStream=0)
    )
    monkeypatch.setattr(driver, "stream", lambda: 0)
    monkeypatch.setattr(driver, "capturing", lambda: False)
    monkeypatch.setattr(runtime, "side_streams", set())
    return found


def bound_of(recorder, iterations=300):
    kernel = types.SimpleNamespace(
        words=["u64", "u32", None, None], lengths=[0, 0, 3, 0], is_float=[False, False, False, True]
    )
    kernel.name = "example"
    kernel.runtime = types.SimpleNamespace(is_cuda=True)
    offsets, recorder.size = launch.argument_layout(kernel.words, kernel.lengths)
    arrays = [view(np.zeros(4, np.float32), "a", "example") for _ in range(2)]
    native = launch._Native("function", 128, offsets, recorder.size)
    return launch._NativeBound(kernel, iterations, (*arrays, (1, -2, 3), 0.5), native), arrays


ARGUMENTS = np.dtype(
    {
        "names": ["n0", "p0", "n1", "p1", "v", "f"],
        "formats": ["<i4", "<u8", "<i4", "<u8", ("<i4", 3), "<f4"],
        "offsets": [0, 8, 16, 24, 32, 44],
        "itemsize": 48,
    }
)


def test_a_launch_carries_its_arguments(recorder):
    bound, arrays = bound_of(recorder)
    bound.launch()
    other = view(np.zeros(4, np.float32), "a", "example")
    bound.set_array(1, other)
    bound.set_entry(2, 1, 77)
    bound.launch()
    assert (bound._config.blocks, bound._config.block) == (3, 128)
    (_, _, first), (_, _, second) = recorder.launched
    first, second = np.frombuffer(first, ARGUMENTS)[0], np.frombuffer(second, ARGUMENTS)[0]
    assert (first["n0"], first["p0"], first["n1"], first["p1"]) == (300, arrays[0].ptr, 1, arrays[1].ptr)
    assert (first["v"].tolist(), first["f"]) == ([1, -2, 3], 0.5)
    assert (second["p0"], second["p1"], second["v"].tolist()) == (arrays[0].ptr, other.ptr, [1, 77, 3])


def test_a_launch_goes_to_the_stream_of_the_moment(recorder, monkeypatch):
    bound, _ = bound_of(recorder)
    for handle in (0, 64, 64, 128, 0):
        monkeypatch.setattr(driver, "stream", lambda handle=handle: handle)
        bound.launch()
    assert [stream for _, stream, _ in recorder.launched] == [0, 64, 64, 128, 0]
    assert runtime.side_streams - {0} == {64, 128}


def test_a_thread_without_a_context_gets_one_and_a_second_failure_is_raised(recorder):
    bound, _ = bound_of(recorder)
    recorder.failures = [Refused(201)]
    bound.launch()
    assert len(recorder.launched) == 1
    recorder.failures = [Refused(201), Refused(201)]
    with pytest.raises(tikv.ArchError, match="example: the CUDA driver says CUDA_ERROR_INVALID_CONTEXT"):
        bound.launch()
    assert len(recorder.launched) == 1


def test_a_position_is_not_baked_into_a_graph(recorder, monkeypatch):
    bound, _ = bound_of(recorder)
    monkeypatch.setattr(driver, "stream", lambda: 64)
    bound.set_entry(2, 0, 5)
    monkeypatch.setattr(driver, "capturing", lambda: True)
    bound.set_entry(2, 0, 6)
    with pytest.raises(tikv.ArchError, match=r"baked into the CUDA graph.*positions_on_device"):
        bound.launch()
    assert recorder.launched == []
    unchanging, _ = bound_of(recorder)
    unchanging.launch()
    assert len(recorder.launched) == 1, "what the host never changes may be captured"
    cuda = types.SimpleNamespace(is_cuda=True)
    with pytest.raises(tikv.ArchError, match=r"KVCacheStore\.append: a position on the host"):
        launch.refuse_baked(cuda, "KVCacheStore.append")
    launch.refuse_baked(types.SimpleNamespace(is_cuda=False), "KVCacheStore.append")


# --- which launcher


@pytest.fixture
def choice(monkeypatch):
    """No launcher chosen, nothing known yet about the driver."""
    monkeypatch.delenv("TIKV_LAUNCHER", raising=False)
    monkeypatch.setattr(launch, "_chosen", None)
    monkeypatch.setattr(launch, "_unavailable", None)
    monkeypatch.setattr(launch, "_fallbacks", {})
    return monkeypatch


CUDA = types.SimpleNamespace(is_cuda=True, is_cpu=False, arch="cuda")
CPU = types.SimpleNamespace(is_cuda=False, is_cpu=True, arch="cpu")


def missing():
    raise tikv.ArchError("cuda-bindings cannot be imported. Install taichi-kv[cuda].")


def test_native_is_taken_where_the_driver_answers(choice):
    choice.setattr(driver, "device", lambda: None)
    assert launch.launcher_report(CUDA)["launcher"] == "native"
    assert launch.launcher_report(CPU)["launcher"] == "direct"
    for name in ("direct", "public", "native"):
        choice.setenv("TIKV_LAUNCHER", name)
        assert launch.launcher_report(CUDA) == {"launcher": name, "why": "asked for", "fallbacks": {}}
    launch.choose_launcher("direct")
    assert launch.launcher_report(CUDA)["launcher"] == "direct"
    launch.choose_launcher(None)


def test_without_a_driver_taichi_launches_and_the_report_says_why(choice):
    choice.setattr(driver, "device", missing)
    report = launch.launcher_report(CUDA)
    assert report["launcher"] == "direct"
    assert "Install taichi-kv[cuda]" in report["why"]
    choice.setenv("TIKV_LAUNCHER", "native")
    assert launch.launcher_report(CUDA)["launcher"] == "none"
    with pytest.raises(tikv.ArchError, match=r"asked for and is not there.*taichi-kv\[cuda\]"):
        launch._launcher(CUDA)
    assert launch._launcher(CPU)[0] == "direct"


def test_an_unknown_launcher_is_refused(choice):
    with pytest.raises(tikv.ArchError, match="native, direct, public"):
        launch.choose_launcher("fast")
    choice.setenv("TIKV_LAUNCHER", "fast")
    with pytest.raises(tikv.ArchError, match="TIKV_LAUNCHER=fast"):
        launch._launcher(CPU)


def kernel_stub(native=None):
    found = launch.Kernel.__new__(launch.Kernel)
    found.factory, found.choices, found.native = test_an_unknown_launcher_is_refused, (1,), native
    found.words, found.lengths, found.runtime = ["u64"], [0], CUDA
    return found


def test_a_kernel_that_cannot_be_patched_stays_with_taichi(choice):
    def refuse(kernel):
        raise ptx.Unpatchable("a form nobody knows")

    choice.setattr(launch, "_load_native", refuse)
    choice.setattr(driver, "device", lambda: None)
    choice.setattr(driver, "capturing", lambda: False)
    on_gpu = types.SimpleNamespace(device="cuda:0")
    kernel = kernel_stub()
    assert kernel._bind_native(1, (on_gpu,)) is None
    assert list(launch.launcher_report(CUDA)["fallbacks"].values()) == ["a form nobody knows"]
    assert kernel._bind_native(1, (on_gpu,)) is None
    choice.setattr(launch, "_fallbacks", {})
    choice.setenv("TIKV_LAUNCHER", "native")
    with pytest.raises(ptx.Unpatchable):
        kernel._bind_native(1, (on_gpu,))


def test_host_arrays_stay_with_taichi(choice):
    assert kernel_stub(native="loaded")._bind_native(1, (types.SimpleNamespace(device="cpu"),)) is None


def test_taichis_launcher_refuses_a_capture(choice):
    choice.setattr(driver, "capturing", lambda: True)
    choice.setattr(driver, "device", missing)
    bound = launch._OnLegacyStream.__new__(launch._OnLegacyStream)
    bound.kernel = kernel_stub()
    with pytest.raises(tikv.ArchError, match=r"cannot capture.*taichi-kv\[cuda\]"):
        bound.launch()


# --- the disk


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKV_CACHE_DIR", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def test_a_kernel_is_kept_whole(folder):
    assert disk_cache.read("key") is None
    disk_cache.write("key", "text of a kernel\nπ\n")
    assert disk_cache.read("key") == "text of a kernel\nπ\n"
    assert [p.name for p in folder.iterdir()] == ["key.ptx"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-1],
        lambda raw: raw[: len(disk_cache.MAGIC) + 10],
        lambda raw: b"",
        lambda raw: raw.replace(b"kernel", b"kernfl"),
        lambda raw: raw + b"\n",
        lambda raw: b"#!/bin/sh\n",
        lambda raw: b"\xff" * 100,
    ],
    ids=["shorter", "header", "empty", "a bit", "longer", "foreign", "noise"],
)
def test_a_damaged_entry_is_not_trusted(folder, damage, caplog):
    disk_cache.write("key", "text of a kernel\n")
    (folder / "key.ptx").write_bytes(damage((folder / "key.ptx").read_bytes()))
    assert disk_cache.read("key") is None
    assert "damaged or foreign" in caplog.text
    disk_cache.write("key", "text of a kernel\n")
    assert disk_cache.read("key") == "text of a kernel\n"


def test_an_entry_of_another_key_is_foreign(folder):
    disk_cache.write("one", "text")
    (folder / "one.ptx").rename(folder / "two.ptx")
    assert disk_cache.read("two") is None


def test_what_was_used_longest_ago_goes(folder, monkeypatch):
    import os

    for age, key in enumerate("abcd"):
        disk_cache.write(key, key * 1000)
        os.utime(folder / f"{key}.ptx", (age, age))
    assert disk_cache.read("a") == "a" * 1000, "reading counts as use"
    monkeypatch.setattr(disk_cache, "LIMIT_BYTES", 3500)
    disk_cache.write("e", "e" * 1000)
    assert sorted(p.stem for p in folder.iterdir()) == ["a", "d", "e"]


def test_a_folder_that_cannot_be_written_is_said_not_raised(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIKV_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    disk_cache.write("key", "text")
    assert "cannot be written" in caplog.text
    assert disk_cache.read("key") is None


def test_the_folder_is_the_platforms(monkeypatch):
    for name in ("TIKV_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    home = pathlib.Path.home()
    for platform, want in (
        ("linux", home / ".cache"),
        ("darwin", home / "Library" / "Caches"),
        ("win32", home / "AppData" / "Local"),
    ):
        monkeypatch.setattr(sys, "platform", platform)
        assert disk_cache.folder() == want / "taichi-kv"


# --- the compiling process


def make_nothing(*choices):
    """A factory that another process can name."""


def test_a_key_names_everything_that_the_ptx_depends_on(monkeypatch):
    first = compiler.key_of(make_nothing, (1, "a"), "sm_90")
    assert compiler.key_of(make_nothing, (1, "a"), "sm_90") == first
    others = [
        compiler.key_of(make_nothing, (1, "b"), "sm_90"),
        compiler.key_of(make_nothing, (1, "a"), "sm_80"),
        compiler.key_of(kernel_stub, (1, "a"), "sm_90"),
    ]
    monkeypatch.setattr(runtime, "version_of", lambda name: "0")
    others.append(compiler.key_of(make_nothing, (1, "a"), "sm_90"))
    monkeypatch.undo()
    monkeypatch.setattr(compiler, "_sources", lambda directory: "another source")
    others.append(compiler.key_of(make_nothing, (1, "a"), "sm_90"))
    monkeypatch.undo()
    monkeypatch.setattr(make_nothing, "fast_math", True, raising=False)
    others.append(compiler.key_of(make_nothing, (1, "a"), "sm_90"))
    assert len({first, *others}) == len(others) + 1


SERVER = """
import json, pathlib, sys; sys.path[:] = json.loads(sys.argv[1])
from tikv import runtime
from tikv.launch.cuda import compiler

kernels = set()


def init(arch, **options):
    print("noise on stdout", flush=True)
    kernels.clear()


def launch(factory, choices):
    text = f"ptx of {factory.__name__}{sorted(choices)}"
    if not choices:
        raise RuntimeError("an illegal address")
    if text not in kernels:
        pathlib.Path("taichi_kernel_nvptx_0001.ptx").write_text(text)
    kernels.add(text)


runtime.init = init
compiler.serve(launch)
"""


@pytest.fixture
def child(folder, monkeypatch, tmp_path):
    """A compiling process whose Taichi is a stand-in."""
    compiler.close()
    monkeypatch.setattr(compiler, "_BOOT", SERVER)
    monkeypatch.chdir(tmp_path)
    yield
    compiler.close()


def test_a_child_compiles_once_and_leaves_no_trace(child, tmp_path):
    want = "ptx of make_nothing[1, 2]"
    assert compiler.ptx_of(make_nothing, (1, 2), "sm_90") == want
    process = compiler._child.process
    assert compiler.ptx_of(make_nothing, (3,), "sm_90") == "ptx of make_nothing[3]"
    assert compiler._child.process is process, "one process serves all"
    compiler.close()
    assert process.poll() == 0, "it ends with its parent's pipe"
    assert compiler.ptx_of(make_nothing, (1, 2), "sm_90") == want
    assert compiler._child is None, "the second time it comes from the disk"
    assert [p.name for p in tmp_path.iterdir()] == ["kernels"]


def test_a_damaged_entry_is_compiled_again(child, folder):
    want = compiler.ptx_of(make_nothing, (1,), "sm_90")
    (entry,) = folder.iterdir()
    entry.write_text("nonsense")
    assert compiler.ptx_of(make_nothing, (1,), "sm_90") == want
    assert disk_cache.read(entry.stem) == want


def test_a_child_that_died_is_replaced(child):
    compiler.ptx_of(make_nothing, (1,), "sm_90")
    compiler._child.process.kill()
    compiler._child.process.wait()
    assert compiler.ptx_of(make_nothing, (2,), "sm_90") == "ptx of make_nothing[2]"


def test_a_kernel_that_equals_another_is_generated_again(child):
    """Taichi shares the code of kernels that differ in their choices alone, and then writes none."""
    assert compiler.ptx_of(make_nothing, (1, 2), "sm_90") == "ptx of make_nothing[1, 2]"
    assert compiler.ptx_of(make_nothing, (2, 1), "sm_90") == "ptx of make_nothing[1, 2]"


def test_what_cannot_be_compiled_says_why(child, monkeypatch):
    with pytest.raises(tikv.ArchError, match="RuntimeError: an illegal address"):
        compiler.ptx_of(make_nothing, (), "sm_90")
    assert compiler.ptx_of(make_nothing, (1,), "sm_90"), "another process goes on"
    with pytest.raises(tikv.ArchError, match="cannot be named"):
        compiler.ptx_of(lambda: None, (), "sm_90")
    monkeypatch.setattr(make_nothing, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "make_nothing", make_nothing, raising=False)
    with pytest.raises(tikv.ArchError, match="__main__"):
        compiler.ptx_of(make_nothing, (5,), "sm_90")


def test_a_child_that_cannot_start_says_why(folder, monkeypatch):
    compiler.close()
    monkeypatch.setattr(compiler, "_BOOT", "raise SystemExit('no such GPU')")
    with pytest.raises(tikv.ArchError, match="the compiling process failed: no such GPU"):
        compiler.ptx_of(make_nothing, (1,), "sm_90")
    assert compiler._child is None


@pytest.mark.parametrize("bits", [8, 16, 32], ids=["int8", "float16", "float32"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows", range(1, 9))
def test_a_block_of_attention_has_room_for_its_results(rows, masked, bits):
    """A block may have 48 KiB of shared memory, and the rows of a task halve down to one among the lanes of a key."""
    from tikv.kernels import attention_cuda as lanes

    for width in range(8, lanes.WIDEST + 1, 8):
        shape = lanes.shape_of(width, lanes.BITS // bits, rows, masked)
        kept, groups = lanes.rows_kept(rows), lanes.BLOCK // shape.lanes
        assert 4 * kept * groups * (width + 2) <= 48 << 10, (width, shape)
        assert kept <= shape.lanes <= 32, (width, shape)
        assert shape.keys in (2, 4, 8), (width, shape)  # they halve among the lanes of a row
        assert shape.resident * 4 * kept * groups * (width + 2) <= 220 << 10, (width, shape)
