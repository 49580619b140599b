"""What warps copy into shared memory, with the instructions of CUDA replaced by reads and writes of a field."""

import types

import numpy as np
import pytest

from tikv import arrays
from tikv.formats import OF_CODE
from tikv.kernels.attention.parameters import PARAMS, STRIDES, Choices, P, S
from tikv.kernels.attention.sm80 import copies, kinds
from tikv.kernels.attention.sm80.attend import Tile, tile_of
from tikv.kernels.attention.sm80.tiles import (
    L,
    in_tile,
    make_find_keys,
    make_find_values,
    make_look_up,
    make_slot_behind,
    make_tile_at,
)
from tikv.kernels.attention.task import T
from tikv.kernels.attention.visible import V
from tikv.kernels.codec import word_array
from tikv.runtime import ti

pytestmark = pytest.mark.thorough

CODES = ["i8", "quant8_64", "quant4_64", "quant8_32", "quant4_32", "q8_0", "q4_0", "e4m3", "mxfp8", "mxfp4", "nvfp4"]
SCALES = {"mxfp8": "e8m0", "mxfp4": "e8m0", "nvfp4": "e4m3", "e4m3": ""}
TOKENS, HEADS, HEAD, END, SHARED = 160, 3, 1, 70, 128


class Memory:
    """K, V and their numbers side by side, the shared memory of a warp, and the places of what its lanes read of it."""

    def __init__(self, bytes_of_all):
        self.words, self.shared = ti.field(ti.u32, len(bytes_of_all) // 4), ti.field(ti.u32, 2048)
        self.read, self.count, self.lane = ti.field(ti.i32, (64, 32, 2)), ti.field(ti.i32, 1), ti.field(ti.i32, 1)
        self.words.from_numpy(bytes_of_all.view(np.uint32))

    def instructions(self):
        """Those of `tensor_cores.ll` that copy and read."""
        words, shared, places, count, lane = self.words, self.shared, self.read, self.count, self.lane

        def copy(size):
            @ti.func
            def copied(to, source):
                for i in ti.static(range(size // 4)):
                    shared[ti.cast(to >> ti.u32(2), ti.i32) + i] = words[ti.cast(source >> ti.u64(2), ti.i32) + i]

            return copied

        @ti.func
        def word_at(at, size):
            places[count[0], lane[0], 0], places[count[0], lane[0], 1] = ti.cast(at, ti.i32), size
            return shared[ti.cast(at >> ti.u32(2), ti.i32)] >> ((at & ti.u32(3)) << ti.u32(3))

        # Registers are 0 before they are read.
        @ti.func
        def read_16(a: ti.template(), b: ti.template(), c: ti.template(), d: ti.template(), at):
            d |= word_at(at + ti.u32(12), 4)
            c |= word_at(at + ti.u32(8), 4)
            b |= word_at(at + ti.u32(4), 4)
            a |= word_at(at, 16)
            count[0] += 1

        @ti.func
        def read_8(a: ti.template(), b: ti.template(), at):
            b |= word_at(at + ti.u32(4), 4)
            a |= word_at(at, 8)
            count[0] += 1

        def read(size):
            @ti.func
            def one(a: ti.template(), at):
                a |= word_at(at, size) & ti.u32((1 << 8 * size) - 1)
                count[0] += 1

            return one

        @ti.func
        def read_global_2(a: ti.template(), at):
            word = words[ti.cast(at >> ti.u64(2), ti.i32)]
            a |= (word >> ti.cast((at & ti.u64(2)) << ti.u64(3), ti.u32)) & ti.u32(0xFFFF)

        return types.SimpleNamespace(
            copy_16=copy(16), copy_4=copy(4), read_16=read_16, read_8=read_8, read_4=read(4), read_2=read(2),
            read_1=read(1), read_global_2=read_global_2,
        )  # fmt: skip

    def most_in_a_bank(self):
        """How many words of a bank lanes read at once, at most: 1 if nobody waits for another."""
        most = 0
        for places in self.read.to_numpy()[: self.count.to_numpy()[0]]:
            size = max(4, places[0, 1])
            for at_once in places[:, 0].reshape(-1, min(32, 128 // size)):
                words = np.unique(at_once[:, None] // 4 + np.arange(size // 4))
                most = max(most, np.bincount(words % 32).max())
        return most


def choices(name, width, place, kind):
    """Choices that matter here."""
    table = {"page": 16, "table_bits": 32} if place == "table" else {"page": 0, "table_bits": 0}
    return Choices(
        place, table["page"], place == "ring", name, kind.word_bits(name, width, width)[0], SCALES.get(name, "f16"),
        (0, 0), (0, 0), "f16", "f32", width, width, 4, 8, False, False, False, 32, table["table_bits"],
    )  # fmt: skip


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("name", "width", "place"),
    [(name, 128, "linear") for name in CODES]
    + [(name, 64, "linear") for name in ("i8", "quant4_64", "mxfp4")]
    + [("quant4_64", 128, "table"), ("quant8_64", 128, "ring"), ("i8", 128, "table")],
)
def test_a_warp_takes_from_shared_memory_what_it_would_read(arch, rng, monkeypatch, name, width, place):
    """The same registers, and no two lanes wait for the same bank."""
    if not arrays.runtime_of().engine.has_bitcode:
        pytest.skip(f"{arrays.runtime_of().engine.title} cannot link bitcode, which tensor cores need")
    kind = kinds.kind_of(name)
    c, layout = choices(name, width, place, kind), copies.copied(name, width, width)
    sizes = [TOKENS * HEADS * n for n in (layout.row, layout.row, layout.numbers, layout.numbers)]
    parts = [rng.integers(0, 256, max(8, n), dtype=np.uint8) for n in sizes]
    bases = np.cumsum([0, *(len(a) for a in parts)])
    memory = Memory(np.concatenate(parts))
    monkeypatch.setattr(copies, "instructions", memory.instructions)
    f, slot_behind = kind.make_fragments(Tile(1, "keys", 1), in_tile(c)), make_slot_behind(c)
    copy = copies.make_copy(slot_behind, layout, in_tile(c))
    numbers_of_lane = copies.make_numbers_of_lane(slot_behind, in_tile(c))
    take_keys = copies.make_take_keys(layout, c)
    take_values = copies.make_take_values(layout, kind.codes_of(name, width), c)
    look_up, tile_at, find_keys, find_values = make_look_up(c), make_tile_at(c), make_find_keys(c), make_find_values(c)
    K, V_ = (word_array(bits) for bits in kind.word_bits(name, width, width))
    KS, VS = kind.numbers_arrays(c)
    LANES = ti.types.ndarray(dtype=ti.u32, ndim=2)
    shared, lane_of, count = memory.shared, memory.lane, memory.count

    @ti.kernel
    def run(k: K, v: V_, k_scale: KS, v_scale: VS, table: ti.types.ndarray(dtype=ti.i32, ndim=1), strides: STRIDES,
            params: PARAMS, visible: ti.types.vector(len(V), ti.i32), task: ti.types.vector(len(T), ti.i32),
            seen: ti.types.vector(len(L), ti.i32), at: ti.i32, b0: ti.u64, b1: ti.u64, b2: ti.u64, b3: ti.u64,
            read: LANES, taken: LANES):  # fmt: skip
        ti.loop_config(serialize=True)
        for _ in range(1):
            begins = [b0, b1, b2, b3]
            block = look_up(at, seen, visible, task, table, strides, params)
            tile = tile_at(block, task, strides)
            for lane in range(32):
                copy(at, block, lane, ti.u32(SHARED), begins, seen, visible, tile, table, strides, params)
                if ti.static(layout.one_each):
                    found = numbers_of_lane(at, block, lane, begins, seen, visible, tile, table, strides, params)
                    place = ti.static((SHARED + 2 * 16 * layout.row) // 4) + lane // 2
                    half = ti.cast(lane % 2 * 16, ti.u32)
                    shared[place] = (shared[place] & ~(ti.u32(0xFFFF) << half)) | (found << half)
            for lane in range(32):
                lane_of[0], count[0] = lane, 0
                kf, vf = [ti.u32(0) for _ in range(f.keys)], [ti.u32(0) for _ in range(f.values)]
                k_slots, v_slots, counts = [0 for _ in range(2)], [0 for _ in range(4)], [0 for _ in range(6)]
                find_keys(at, block, lane, seen, visible, task, table, k_slots, strides, params)
                f.load_keys(lane, k_slots, tile, k, k_scale, kf, strides)
                find_values(at, block, lane, seen, visible, task, table, v_slots, counts, strides, params)
                f.load_values(lane, v_slots, tile, v, v_scale, vf, strides)
                for i in ti.static(range(f.keys)):
                    read[lane, i], kf[i] = kf[i], ti.u32(0)
                for i in ti.static(range(f.values)):
                    read[lane, f.keys + i], vf[i] = vf[i], ti.u32(0)
                take_keys(lane, ti.u32(SHARED), kf)
                take_values(lane, ti.u32(SHARED), vf)
                for i in ti.static(range(f.keys)):
                    taken[lane, i] = kf[i]
                for i in ti.static(range(f.values)):
                    taken[lane, f.keys + i] = vf[i]

    of_words = [bits // 8 for bits in kind.word_bits(name, width, width)]
    size = 1 if name in SCALES else 2
    token, head = (HEADS, 1) if place == "table" else (1, TOKENS)  # rows from a token to the next, and between heads
    strides, params, task, visible = (np.zeros(len(each), int) for each in (S, P, T, V))
    for at, nbytes in ((S.k_token, layout.row // of_words[0]), (S.v_token, layout.row // of_words[1]),
                       (S.scale_token, layout.numbers // size)):  # fmt: skip
        strides[at], strides[at - 1] = token * nbytes, 16 * HEADS * nbytes
    task[T.k_first], task[T.v_first] = (HEAD * head * layout.row // n for n in of_words)
    task[T.scale_first], task[T.end] = HEAD * head * layout.numbers // size, END
    strides[S.table_block], params[P.blocks], params[P.queries] = 1, TOKENS // 16, 1
    params[P.sinks], params[P.ring], visible[V.sinks] = 3, 99, 3 * (place == "ring")
    words = [a.view(f"u{n}") for a, n in zip(parts, (*of_words, *words_of_numbers(name, width, size)), strict=True)]
    for at in (32, 64):  # the last tile has keys that do not exist
        read, taken = (np.zeros((32, f.keys + f.values), np.uint32) for _ in range(2))
        vectors = STRIDES(*strides), PARAMS(*params), ti.Vector(visible), ti.Vector(task), ti.Vector([0, END, -1, END])
        run(*words, rng.permutation(TOKENS // 16).astype(np.int32), *vectors, at, *bases[:4].tolist(), read, taken)
        np.testing.assert_array_equal(taken, read)
        assert memory.most_in_a_bank() == 1


def words_of_numbers(name, width, size):
    """Bytes of an entry of the arrays of K's numbers and of V's, as `numbers_arrays` has them."""
    if name == "e4m3":
        return 4, 4
    if name in SCALES:
        from tikv.kernels.attention.sm80.floats import scales_per_word

        return scales_per_word(name, width, width), 1
    return (size * (getattr(OF_CODE[name], "numbers", 1)),) * 2


@pytest.mark.parametrize("name", [name for name in CODES if copies.blocks_of(name, 128, 128)])
def test_all_blocks_fit_a_multiprocessor(name):
    tile = tile_of(128, 4, name, copied=True)
    merged = 4 * 8 * (128 + 4) * 4  # of four warps with eight rows: columns, three sums, and notes of the block
    each = copies.shared_bytes(tile.stages, name, 128, 128) + merged + copies.RESERVED
    assert 3 <= tile.stages <= copies.MOST_STAGES
    assert tile.resident * each <= copies.MEMORY
