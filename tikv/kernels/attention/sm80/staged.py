"""K and V of a prompt in the shared memory of a multiprocessor, for a block whose warps divide its query rows.

A block reads once what each of its warps needs: `STAGED_KEYS` keys at a time, a word of 64 bits for each thread and
row. The next keys are loaded while these are used. The words of a row are permuted by a few bits of its number, so that
the words that half a warp reads or writes at once lie in different banks.
"""

from tikv.kernels.attention.addresses import make_slot_offsets
from tikv.kernels.attention.parameters import S
from tikv.kernels.attention.task import T
from tikv.kernels.lanes import BLOCK
from tikv.runtime import ti

KEYS = 16  # of a product
STAGED_KEYS = 2 * KEYS  # in shared memory at a time
WIDTHS = (64, 128)  # of rows whose words a block's threads can share evenly


def words_of(c) -> int:
    """Words of 64 bits in a row of K or V."""
    return c.width // 4


def words_of_a_thread(c) -> int:
    """Words of K that a thread reads for `STAGED_KEYS` keys; it reads as many of V."""
    return STAGED_KEYS * words_of(c) // BLOCK


@ti.func
def exchange_of_key(row):
    """The bits that permute the words of a row of K: four lanes each read rows 0 to 3 at once."""
    return ((row & 1) << 3) | (row >> 1 & 1)


@ti.func
def exchange_of_value(row):
    """The same for V: half a warp reads four rows, two apart, with four lanes each."""
    return (row >> 1 & 1) | ((row >> 2 & 1) << 3)


def make_fetch(slot_behind, in_one_page, c):
    """fetch(at, blocks, thread, seen, ..., held, ...): starts to read a thread's words of the keys from index `at`.

    `blocks` has the blocks of the two tiles, as `look_up` gives them; `held` has words of K, then as many of V.
    `in_one_page` says that the keys of a tile follow each other in one page.
    """
    k_offset, v_offset, _ = make_slot_offsets(c)
    WORDS, COUNT = words_of(c), words_of_a_thread(c)
    ROWS = BLOCK // WORDS  # at once

    @ti.func
    def fetch(at, blocks: ti.template(), thread, seen, visible, task, table: ti.template(), k: ti.template(),
              v: ti.template(), held: ti.template(), strides, params):  # fmt: skip
        k_at, v_at = 0, 0
        for j in ti.static(range(COUNT)):
            tile, ahead = ti.static(j * ROWS // KEYS, j * ROWS % KEYS)
            if ti.static(in_one_page and ahead > 0):
                k_at, v_at = k_at + ROWS * strides[S.k_token], v_at + ROWS * strides[S.v_token]
            else:
                slot = slot_behind(at + ti.static(tile * KEYS), ahead + thread // WORDS, blocks[tile], seen, visible,
                                   task, table, strides, params)  # fmt: skip
                k_at = task[T.k_first] + k_offset(ti.max(slot, 0), strides) + thread % WORDS
                v_at = task[T.v_first] + v_offset(ti.max(slot, 0), strides) + thread % WORDS
            held[j], held[ti.static(COUNT + j)] = k[k_at], v[v_at]

    return fetch


def make_put(c):
    """put(thread, held, keys, values): writes a thread's words to shared memory."""
    WORDS, COUNT = words_of(c), words_of_a_thread(c)
    ROWS = BLOCK // WORDS

    @ti.func
    def put(thread, held: ti.template(), keys: ti.template(), values: ti.template()):
        for j in ti.static(range(COUNT)):
            row, word = ti.static(j * ROWS) + thread // WORDS, thread % WORDS
            keys[row * WORDS + (word ^ exchange_of_key(row))] = held[j]
            values[row * WORDS + (word ^ exchange_of_value(row))] = held[ti.static(COUNT + j)]

    return put


def make_take_keys(c):
    """take_keys(first, lane, keys, kf): a lane's fragments of the 16 keys from row `first`, as from `load_keys`."""
    WORDS, NK = words_of(c), c.width // KEYS

    @ti.func
    def take_keys(first, lane, keys: ti.template(), kf: ti.template()):
        for i in ti.static(range(2)):
            row = first + (lane >> 2) + ti.static(i * 8)
            changed = (lane & 3) * 2 ^ exchange_of_key(row)
            for n in ti.static(range(NK)):
                word = ti.static(n // 2 * 8 + n % 2)
                pair = keys[row * WORDS + (changed ^ ti.static(word & 15)) + ti.static(word & ~15)]
                kf[ti.static(2 * NK * i + 2 * n)] = ti.cast(pair, ti.u32)
                kf[ti.static(2 * NK * i + 2 * n + 1)] = ti.cast(pair >> ti.u64(32), ti.u32)

    return take_keys


def make_take_values(c):
    """take_values(first, lane, values, vf): the same for V, as from `load_values`."""
    WORDS, NV = words_of(c), c.width // KEYS

    @ti.func
    def take_values(first, lane, values: ti.template(), vf: ti.template()):
        for i in ti.static(range(4)):
            row = first + (lane & 3) * 2 + ti.static(i % 2 + i // 2 * 8)
            changed = (lane >> 2) * 2 ^ exchange_of_value(row)
            for n in ti.static(range(NV // 2)):
                pair = values[row * WORDS + (changed ^ ti.static(n % 2)) + ti.static(n // 2 * 16)]
                vf[ti.static(NV * i + 2 * n)] = ti.cast(pair, ti.u32)
                vf[ti.static(NV * i + 2 * n + 1)] = ti.cast(pair >> ti.u64(32), ti.u32)

    return take_values
