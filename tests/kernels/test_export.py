"""`tikv export`: kernels that a program without Python can bind, and one that does."""

import json
import os
import pathlib
import re
import struct
import subprocess
import sys
from collections import Counter

import pytest

from tikv import __main__ as cli
from tikv import errors
from tikv.launch import ahead
from tikv.tools import export

pytestmark = [pytest.mark.once, pytest.mark.thorough]
EXAMPLE = pathlib.Path(__file__).parent.parent.parent / "examples" / "export_vulkan" / "run.py"


@pytest.fixture(scope="module")
def exported(vulkan, tmp_path_factory):
    """(folder, kernels.json) of some operations."""
    folder = tmp_path_factory.mktemp("export") / "kernels"
    operations = "copy_kv,gather_paged,merge_states,compact,rotate,KVCacheStore.append,PagedKVCacheStore.append"
    asked = ["--op", operations, "--dtype", "bfloat16,int8", "--head-dim", "32", "--kv-heads", "4"]
    child = subprocess.run(
        [sys.executable, "-m", "tikv", "export", folder, *asked],
        capture_output=True, text=True, env=vulkan, timeout=300,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    found = json.loads((folder / "kernels.json").read_text(encoding="utf-8"))
    assert f"{len(found['kernels'])} kernels for {len(found['launches'])} launches" in child.stdout
    return folder, found


def test_files_and_facts_agree(exported):
    folder, found = exported
    assert found["form"] == export.FORM
    assert found["sizes"] == {"head_dim": 32, "q_heads": 32, "kv_heads": 4, "block_size": 16}
    launched = Counter((launch["operation"], launch["dtype"]) for launch in found["launches"])
    assert launched == {
        ("copy_kv", "bfloat16"): 2, ("gather_paged", "bfloat16"): 1, ("gather_paged", "int8"): 1,
        ("merge_states", "bfloat16"): 1, ("compact", "bfloat16"): 2, ("compact", "int8"): 3,
        ("rotate", "bfloat16"): 2, ("rotate", "int8"): 2,
        ("KVCacheStore.append", "bfloat16"): 4, ("KVCacheStore.append", "int8"): 4,
        ("PagedKVCacheStore.append", "bfloat16"): 1, ("PagedKVCacheStore.append", "int8"): 1,
    }  # fmt: skip
    listed = {kernel[kind] for kernel in found["kernels"].values() for kind in ("spirv", "metal")}
    assert {path.name for path in folder.iterdir()} == listed | {"kernels.json"}
    for kernel in found["kernels"].values():
        spirv, metal = (folder / kernel["spirv"]).read_bytes(), (folder / kernel["metal"]).read_text(encoding="utf-8")
        assert kernel["validated"] is True
        assert kernel["capabilities"][0] == "Shader"
        # What SPIRV-Cross found in the SPIR-V, in words of its own.
        (threads,) = re.findall(r"gl_WorkGroupSize .*= uint3\((\d+)u, 1u, 1u\)", metal)
        assert kernel["threads_per_threadgroup"] == int(threads)
        assert f"kernel void {kernel['metal_function']}(" in metal
        assert f"constant args_t& args [[buffer({kernel['arguments_binding']})]]" in metal
        arrays = {int(n) for n in re.findall(r"device \w+& \w+ \[\[buffer\((\d+)\)\]\]", metal)}
        assert arrays == {a["binding"] for a in kernel["arguments"] if a.get("binding") is not None}
        sizes = {"float": 4, "int": 4, "uint": 4}
        shared = re.findall(r"threadgroup (\w+) \w+\[(\d+)\];", metal)
        assert kernel["threadgroup_memory_bytes"] == sum(sizes[kind] * int(n) for kind, n in shared)
        assert kernel["threadgroup_memory_bytes"] == ahead.threadgroup_bytes(spirv)


def test_a_launch_gives_every_number_its_place(exported):
    _, found = exported
    for launch in found["launches"]:
        kernel = found["kernels"][launch["kernel"]]
        assert len(launch["arguments"]) == len(kernel["arguments"])
        taken = []
        for argument, given in zip(kernel["arguments"], launch["arguments"], strict=True):
            if "array_of" in argument:
                assert set(given) == {"dtype", "shape"}
                assert argument["binding"] is None or argument["read"] or argument["written"]
                continue
            assert len(argument["at"]) == len(given)
            assert len(argument.get("names", given)) == len(given)
            taken += argument["at"]
        assert len(set(taken)) == len(taken) > 0
        assert all(at % 4 == 0 and at + 4 <= kernel["arguments_bytes"] for at in taken)
    arguments = found["kernels"]["copy_kv_bfloat16_0"]["arguments"]
    assert any("dst_position" in argument.get("names", []) for argument in arguments)
    for launch in found["launches"]:
        dtypes = {given["dtype"] for given in launch["arguments"] if isinstance(given, dict)}
        stored = {"int8", "float16"} if launch["dtype"] == "int8" else {"bfloat16"}
        if launch["operation"] == "compact":  # which moves codes and scales by launches of their own
            assert dtypes & stored
        else:
            assert dtypes >= stored


@pytest.mark.parametrize(
    ("arguments", "error", "why"),
    [
        (["--op", "copy_kv,nothing"], errors.OptionError, "unknown op nothing. Use one of copy, copy_kv"),
        (["--arch", "cuda"], errors.OptionError, "unknown arch cuda. Use one of vulkan, metal"),
        (["--dtype", "float64"], errors.OptionError, "unknown dtype float64. Use one of float32"),
        (
            ["--op", "copy_kv,linearize", "--dtype", "int8"],
            errors.OptionError,
            "copy_kv, linearize stores no int8. Use one of float32, float16, bfloat16, float8_e4m3fn",
        ),
        (["--q-heads", "6", "--kv-heads", "4"], errors.OptionError, "a multiple of kv_heads for q_heads"),
        (["--head-dim", "0"], errors.OptionError, "Use sizes of at least 1"),
    ],
)
def test_what_cannot_be_exported_is_refused_before_anything_is_made(
    monkeypatch, tmp_path, capsys, arguments, error, why
):
    monkeypatch.setattr(export, "export", lambda *args: pytest.fail("it began"))
    assert cli.main(["export", str(tmp_path / "kernels"), *arguments]) == 1
    assert why in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    asked = ["vulkan"], ["copy"], ["float32"], export.Sizes()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(errors.CacheFileError, match="holds other files"):
        export.check(str(tmp_path), *asked)
    with pytest.raises(errors.CacheFileError, match="is not a folder"):
        export.check(str(tmp_path / "file"), *asked)
    (tmp_path / "kernels.json").write_text("{}")
    assert export.check(str(tmp_path), *asked) == tmp_path


def test_without_a_vulkan_driver_the_way_out_is_named(monkeypatch, tmp_path):
    def none(arch):
        raise errors.ArchError(f"init: no {arch}")

    monkeypatch.setattr(export.runtime, "init", none)
    with pytest.raises(errors.ArchError, match=r"none works here \(init: no vulkan\)\. Install one"):
        export.export(tmp_path, ["vulkan"], ["copy"], ["float32"], export.Sizes())


@pytest.mark.full
def test_a_program_in_cpp_gets_the_same_bits(vulkan, compiler, tmp_path):
    child = subprocess.run(
        [sys.executable, EXAMPLE, tmp_path], capture_output=True, text=True, env={**vulkan, **compiler}, timeout=500
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert "2 launches on" in child.stdout
    assert child.stdout.count("the same as tikv's") == 3


@pytest.mark.full
def test_every_operation_is_exported(vulkan, tmp_path):
    command = [sys.executable, "-m", "tikv", "export", tmp_path, "--dtype", "float32,float8_e5m2", "--arch", "vulkan"]
    child = subprocess.run(command, capture_output=True, text=True, env=vulkan, timeout=500)
    assert child.returncode == 0, child.stderr
    found = json.loads((tmp_path / "kernels.json").read_text(encoding="utf-8"))
    made = {(launch["operation"], launch["dtype"]) for launch in found["launches"]}
    assert made == set(export.pairs(list(export.OPERATIONS), ["float32", "float8_e5m2"]))
    assert all(os.path.getsize(tmp_path / kernel["spirv"]) for kernel in found["kernels"].values())
    assert not list(tmp_path.glob("*.metal"))


def test_the_manual_lists_what_is_exported():
    text = (EXAMPLE.parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `([\w.]+)` \| ([\w, ]+) \|$", text.partition("# Without Python")[2], re.MULTILINE))
    assert listed == {name: ", ".join(operation.stored) for name, operation in export.OPERATIONS.items()}


def test_a_kernel_is_the_same_bytes_whenever_it_is_compiled(vulkan, tmp_path):
    """In another process, and after other kernels, which count in the engine's numbers of temporaries."""
    folders = [tmp_path / name for name in ("first", "again", "other order")]
    orders = ["copy,rotate", "copy,rotate", "rotate,merge_states,copy"]
    for folder, operations in zip(folders, orders, strict=True):
        command = [sys.executable, "-m", "tikv", "export", folder, "--op", operations, "--dtype", "float32"]
        child = subprocess.run([*command, "--head-dim", "32"], capture_output=True, text=True, env=vulkan, timeout=300)
        assert child.returncode == 0, child.stderr
    first, again, other = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert first == again
    assert len(first) > 6
    del first["kernels.json"]  # which lists operations in the order in which they were asked for
    assert {name: other[name] for name in first} == first


def test_names_of_temporaries_keep_what_they_say():
    def module(*names):
        found = struct.pack("<5I", 0x07230203, 0x10300, 0, 9, 0)
        for i, name in enumerate(names):
            text = name.encode() + b"\0" * (4 - len(name) % 4)
            found += struct.pack("<2I", (2 + len(text) // 4) << 16 | 5, i) + text
        return found + struct.pack("<2I", 2 << 16 | 17, 1)

    before = module("main", "tmp3122_unknown", "tmp7_i32", "tmp3122_u1", "total_elems", "tmp", "xtmp12_i32")
    assert ahead.with_plain_names(before) == module(
        "main", "tmp1_unknown", "tmp2_i32", "tmp1_u1", "total_elems", "tmp", "xtmp12_i32"
    )
