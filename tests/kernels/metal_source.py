"""The Metal source of every kernel, made on a machine without Metal: `python metal_source.py FOLDER`.

Taichi's Metal back end compiles a kernel to SPIR-V under Metal's capabilities and hands it to SPIRV-Cross. The
ahead-of-time module with those capabilities gives the same SPIR-V. The kernels are those that the calls below would
launch on Vulkan, where the same source runs. Prints one JSON line a kernel: its factory and its name.
"""

import json
import pathlib
import sys

import ml_dtypes
import numpy as np

import tikv
from tikv import launch, runtime

BF16 = np.dtype(ml_dtypes.bfloat16)
F32, F16 = np.dtype(np.float32), np.dtype(np.float16)


def copies():
    for src, cache in ((F32, F32), (F16, F16), (F32, F16), (F32, BF16), (BF16, F32)):
        for width in (8, 3):
            for window in (None, 5):
                k = np.zeros((2, 3, width), src)
                caches = [np.zeros((3, 5, width), cache) for _ in "kv"]
                tikv.copy(k, caches[0], position=0, window=window)
                tikv.copy_kv(k, k, *caches, position=0, window=window)
    tikv.linearize(np.zeros((3, 5, 8), F16), np.zeros((3, 5, 8), F16), length=9)


def stores():
    for dtype, window, batch in (
        ("float16", None, 1),
        ("bfloat16", 5, 2),
        ("int8", [4, None], 1),
        ("int8", 4, 2),
        ("float32", [None, 3], 2),
    ):
        store = tikv.KVCacheStore(
            num_layers=2, num_kv_heads=2, head_dim=8, capacity=6, dtype=dtype, window=window, batch_size=batch
        )
        k = np.zeros((2, batch, 1, 2, 8), F32)
        if dtype == "int8" or dtype == "float32" or dtype == "float16":
            store.append_all(k, k)
        else:
            k = k.astype(store.dtype.numpy)
            store.append_all(k, k)
        store.append(0, k[0], k[0])
        store.tokens(0)
        store.reorder([0] * batch)
        store.snapshot()
        tikv.compile_step(store, layers=0, attend=False).prepare(k[0], k[0])


def scattered():
    rows, slots = np.zeros((3, 2, 8), F16), np.array([0, 5, -1], np.int32)
    for layout, shape in (("NHD", (4, 2, 2, 8)), ("HND", (4, 2, 2, 8))):
        pools = [np.zeros(shape, F16) for _ in "kv"]
        tikv.write_slots(rows, rows, *pools, slots, layout=layout)
        tikv.gather_paged(pools[0], np.array([1, 0], np.int32), 3, layout=layout)
    tikv.write_slots(
        rows, rows, np.zeros((4, 2, 1, 2, 8), F16), np.zeros((4, 2, 8, 2), F16), slots.astype(np.int64), layout="VLLM"
    )
    pools = [np.zeros((4, 2, 2, 8), np.int8) for _ in "kv"]
    scales = [np.ones((4, 2, 2), F16) for _ in "kv"]
    tikv.write_slots(rows, rows, *pools, slots, k_scale=scales[0], v_scale=scales[1])
    tikv.gather_paged(pools[0], np.array([1, 0], np.int32), 3, scale=scales[0])
    tikv.copy_blocks(*(np.zeros((4, 2, 2, 8), F16) for _ in "kv"), np.array([[0, 1]], np.int32))
    tikv.append_ragged(
        np.zeros((2, 2, 3, 8), F16), np.zeros((2, 2, 3, 4), F16), np.zeros((2, 2, 6, 8), F16),
        np.zeros((2, 2, 6, 4), F16), np.array([0, -1], np.int32),
    )  # fmt: skip
    for scale in ("float16", "float32"):
        tikv.dequantize(*tikv.quantize(np.zeros((4, 8), F32), scale))


def fused():
    angles = np.zeros((16, 4), F32)
    weight = np.ones(8, F32)
    for mode in ("none", "norm_half", "half", "interleaved", "norm_interleaved"):
        turns = {} if mode == "none" else {"cos": angles, "sin": angles}
        norms = {"q_weight": weight, "k_weight": weight} if "norm" in mode else {}
        for src, dst in ((F32, F16), (F16, F16))[mode != "norm_half" :]:
            tikv.write_qkv(
                np.zeros((2, 8 * 8), src), *(np.zeros((2, 6, 8), dst) for _ in "kv"), num_q_heads=4,
                norm_rope=tikv.NormRope(mode=mode, **turns, **norms), position=1,
            )  # fmt: skip
    tikv.write_qkv(
        np.zeros((2, 8 * 8), F16), *(np.zeros((4, 2, 2, 8), np.int8) for _ in "kv"), num_q_heads=4,
        norm_rope=tikv.NormRope(mode="norm_half", q_weight=weight, k_weight=weight, cos=angles, sin=angles),
        slot_mapping=np.array([3, 0], np.int32), rope_positions=np.array([1, 2], np.int32), layout="NHD",
        k_scale=np.ones((4, 2, 2), F16), v_scale=np.ones((4, 2, 2), F16),
    )  # fmt: skip


def attention():
    for dtype in (F32, F16, BF16):
        attend(dtype, keys=6)
    attend_in_parts(F32)


def attention_in_parts():
    attend_in_parts(F16)
    attend_in_parts(BF16)


def attend(dtype, keys):
    caches = [np.zeros((1, 2, keys, 32), dtype) for _ in "kv"]
    tikv.decode_attention(np.zeros((1, 4, 32), dtype), *caches, np.array([keys], np.int32), return_lse=True)
    return caches


def attend_in_parts(dtype):
    caches = attend(dtype, keys=4096)
    tikv.decode_attention(
        np.zeros((1, 4, 2, 32), dtype), *caches, np.array([4096], np.int32), num_splits=2, return_mass=True
    )
    pools = [np.zeros((4, 2, 2, 32), dtype) for _ in "kv"]
    tables, lens = np.array([[0, 1, 2, 3]], np.int32), np.array([7], np.int32)
    tikv.paged_decode_attention(np.zeros((1, 4, 32), dtype), *pools, tables, lens)
    state = np.zeros((1, 4, 32), dtype), np.zeros((1, 4), F32)
    tikv.merge_states(*state, *state)


GROUPS = {f.__name__: f for f in (copies, stores, scattered, fused, attention, attention_in_parts)}


def metal_capabilities(ti):
    """What Taichi 1.7.4 reports for a Mac's GPU: no float64, no float atomics."""
    names = [f"spirv_has_{n}" for n in ("int8", "int16", "float16", "int64")]
    names += [f"spirv_has_subgroup_{n}" for n in ("basic", "vote", "ballot", "arithmetic")]
    return [getattr(ti.DeviceCapability, name) for name in ("spirv_version_1_3", *names)]


class Unlaunched(launch.Bound):
    """A kernel bound to arguments as if it were launched: what is wanted is its source."""

    def launch(self) -> None:
        pass


def main(folder: pathlib.Path, groups: list[str]) -> None:
    live = tikv.init(arch="vulkan")
    launch.Kernel.bind = lambda self, iterations, *arguments: Unlaunched(self, iterations, arguments)
    for name in groups:
        GROUPS[name]()
    ti = runtime.ti
    module = ti.aot.Module(ti.vulkan, caps=metal_capabilities(ti))
    for number, kernel in enumerate(list(live.kernels.values())):
        with live.compiling(kernel.fast_math):
            module.add_kernel(kernel.function, name=f"kernel{number}")
        print(json.dumps({"factory": kernel.factory.__name__, "name": kernel.name}), flush=True)
    module.save(str(folder))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:] or list(GROUPS))
