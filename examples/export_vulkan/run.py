"""Two exported kernels, launched by a C++ program on Vulkan: it appends tokens to a cache and attends over it.

`python examples/export_vulkan/run.py [FOLDER]` exports them, builds main.cpp (a C++17 compiler and Vulkan's headers;
Debian: g++ libvulkan-dev), runs it, and compares every bit with what tikv computes. The program needs no Python: it
reads launches.txt, and an app would have the same facts in its own code.
"""

import argparse
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

import numpy as np

import tikv

HERE = pathlib.Path(__file__).parent
HEAD_DIM, Q_HEADS, KV_HEADS = 64, 8, 2
POSITION = 5  # of the new tokens
EXPORT = ["--op", "copy_kv,decode_attention", "--dtype", "float16", "--arch", "vulkan"]
SIZES = ["--head-dim", str(HEAD_DIM), "--q-heads", str(Q_HEADS), "--kv-heads", str(KV_HEADS)]
# The kernels' names of arrays, and ours.
ARRAYS = {
    "copy_kv": {"ks": "k_new", "vs": "v_new", "kd": "k_cache", "vd": "v_cache"},
    "decode_attention": {"q": "q", "k": "k_cache", "v": "v_cache", "lens": "lens", "out": "out"},
}


def bits(value, kind):
    """A number of a kernel as 32 bits."""
    (found,) = struct.unpack("<I", struct.pack("<f" if kind == "float32" else "<i", value))
    return found


def lines_of(exported, operation, changed):
    """A launch of launches.txt: the first that was recorded of an operation, with some named numbers changed."""
    launch = next(each for each in exported["launches"] if each["operation"] == operation)
    kernel = exported["kernels"][launch["kernel"]]
    yield f"kernel {kernel['spirv']} {kernel['threadgroups']} {kernel['arguments_binding']} {kernel['arguments_bytes']}"
    for argument, given in zip(kernel["arguments"], launch["arguments"], strict=True):
        if "array_of" in argument:
            if argument["binding"] is not None:
                name = ARRAYS[operation].get(argument["name"], "unused")
                yield f"array {argument['binding']} {name}"
            continue
        names = argument.get("names", [""] * len(given))
        for at, name, value in zip(argument["at"], names, given, strict=True):
            yield f"number {at} {bits(changed.get(name, value), argument['numbers'])}"


def main(folder):
    """Export, build, run, compare."""
    subprocess.run([sys.executable, "-m", "tikv", "export", folder, *EXPORT, *SIZES], check=True)
    exported = json.loads((folder / "kernels.json").read_text(encoding="utf-8"))
    first = next(each for each in exported["launches"] if each["operation"] == "copy_kv")
    (tokens, *_), (_, capacity, _) = (argument["shape"] for argument in first["arguments"][:2])

    rng = np.random.default_rng(0)
    shapes = {
        "k_new": (tokens, KV_HEADS, HEAD_DIM), "v_new": (tokens, KV_HEADS, HEAD_DIM),
        "k_cache": (KV_HEADS, capacity, HEAD_DIM), "v_cache": (KV_HEADS, capacity, HEAD_DIM),
        "q": (1, Q_HEADS, HEAD_DIM),
    }  # fmt: skip
    arrays = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    arrays["lens"] = np.array([POSITION + tokens], np.int32)
    lines = ["buffer out 65536", "buffer unused 65536"]
    for name, array in arrays.items():
        array.tofile(folder / f"{name}.bin")
        lines.append(f"buffer {name} {array.nbytes}")
    lines += lines_of(exported, "copy_kv", {"dst_position": POSITION})
    lines += lines_of(exported, "decode_attention", {})
    lines += [f"save {name}" for name in ("k_cache", "v_cache", "out")]
    (folder / "launches.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")

    program = folder / "main"
    compiler = os.environ.get("CXX", "c++").split()
    flags = os.environ.get("CXXFLAGS", "").split()
    command = [*compiler, "-std=c++17", *flags, str(HERE / "main.cpp"), "-o", str(program), "-l:libvulkan.so.1"]
    subprocess.run(command, check=True)
    subprocess.run([program, folder], check=True)

    tikv.init(arch="vulkan")
    caches = arrays["k_cache"], arrays["v_cache"]
    tikv.copy_kv(arrays["k_new"], arrays["v_new"], *caches, position=POSITION)
    out = tikv.decode_attention(arrays["q"], *(cache[None] for cache in caches), arrays["lens"])
    for name, want in (("k_cache", caches[0]), ("v_cache", caches[1]), ("out", out)):
        got = np.fromfile(folder / f"{name}.out", np.uint8)[: want.nbytes]
        assert (got == np.ascontiguousarray(want).reshape(-1).view(np.uint8)).all(), f"{name} differs"
        print(f"{name}: {want.nbytes} bytes, the same as tikv's")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", nargs="?", type=pathlib.Path, help="where to keep all files (default: a temporary one)"
    )
    if chosen := parser.parse_args().folder:
        main(chosen)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(pathlib.Path(temporary))
