"""Which blocks are free, who holds the others, and which are found by the tokens before their end."""

import hashlib

import numpy as np
import pytest

import tikv
from tikv.stores.pools import blocks as block_pool


def test_blocks_are_taken_last_in_first_out_and_all_or_none():
    pool = block_pool.BlockPool(5)
    assert pool.allocate(3) == [0, 1, 2]
    pool.release([0, 1])
    assert pool.allocate(1) == [0]
    with pytest.raises(tikv.CapacityError, match=r"4 blocks are needed and 3 of 5 are free"):
        pool.allocate(4)
    assert pool.num_free == 3
    assert pool.allocate(3) == [1, 3, 4]


def test_a_block_is_free_when_its_last_holder_lets_go():
    pool = block_pool.BlockPool(2)
    (block,) = pool.allocate(1)
    pool.acquire([block])
    assert (pool.holders(block), pool.num_shared, pool.num_free) == (2, 1, 1)
    pool.release([block])
    assert (pool.holders(block), pool.num_shared, pool.num_free) == (1, 0, 1)
    pool.release([block])
    assert pool.num_free == 2


def test_a_registered_block_is_found_until_it_is_taken_for_something_else():
    pool = block_pool.BlockPool(3)
    a, b = pool.allocate(2)
    pool.register(a, b"a")
    pool.register(b, b"b")
    pool.register(a, b"c")  # it keeps the name it has
    assert pool.prefix([b"a", b"b", b"c"]) == [a, b]
    assert pool.prefix([b"c", b"a"]) == []
    pool.release([a, b])
    assert pool.num_free == 3
    pool.acquire(pool.prefix([b"a"]))  # revived
    assert (pool.holders(a), pool.num_free) == (1, 2)
    assert pool.allocate(1) == [2], "a block without a name is taken first"
    assert pool.find(b"b") == b
    assert pool.allocate(1) == [b]
    assert pool.find(b"b") is None


def test_all_blocks_of_a_digest_are_found_as_long_as_one_is_left():
    pool = block_pool.BlockPool(4)
    a, b, c = pool.allocate(3)
    for block in (a, b, c):
        pool.register(block, b"same")
    assert pool.find(b"same") == a
    pool.release([a])
    assert pool.find(b"same") == b
    assert pool.allocate(1) == [a], "as if it had no name: others have it"
    pool.forget(b)
    assert pool.find(b"same") == c
    pool.release([c])
    assert pool.find(b"same") == c
    pool.register(b, b"same")
    assert pool.find(b"same") == b, "rather one that is held than one that is free"
    pool.forget(b)
    assert pool.allocate(2) == [3, c]
    assert pool.find(b"same") is None


def test_what_was_allocated_can_be_given_back_as_it_was():
    pool = block_pool.BlockPool(4)
    held = pool.allocate(3)
    for block, digest in zip(held, (b"1", b"2", b"3"), strict=True):
        pool.register(block, digest)
    for block in (1, 0, 2):
        pool.release([block])
    for _ in range(2):
        lost = {}
        assert pool.allocate(3, lost=lost) == [3, 1, 0]
        assert lost == {1: b"2", 0: b"1"}
        assert pool.prefix([b"1"]) == []
        pool.give_back([3, 1, 0], lost)
        assert pool.prefix([b"1", b"2", b"3"]) == [0, 1, 2]
    assert pool.allocate(4) == [3, 1, 0, 2]
    pool.give_back([3, 1, 0, 2], {})
    assert (pool.num_free, pool.find(b"1")) == (4, None)


def test_the_longest_unused_name_is_lost_first_and_a_tail_before_its_head():
    pool = block_pool.BlockPool(4)
    for digest, block in zip((b"1", b"2"), pool.allocate(2), strict=True):
        pool.register(block, digest)
    for digest, block in zip((b"3", b"4"), pool.allocate(2), strict=True):
        pool.register(block, digest)
    pool.release([2, 3])
    pool.release([0, 1])
    assert pool.allocate(4) == [3, 2, 1, 0]


def test_digests_depend_on_everything_before_and_leave_out_a_part_block():
    whole = block_pool.chained_digests(list(range(12)), 4)
    assert len(set(whole)) == 3
    assert block_pool.chained_digests(list(range(11)), 4) == whole[:2]
    other = block_pool.chained_digests([9, *range(1, 12)], 4)
    assert not set(whole) & set(other)
    assert block_pool.chained_digests([0, 1, 2, 3] * 2, 4)[0] != block_pool.chained_digests([0, 1, 2, 3] * 2, 4)[1]
    assert block_pool.chained_digests([1 << 40, 2], 2) != block_pool.chained_digests([1, 2], 2)


def test_a_salt_cannot_pass_for_tokens():
    """Else the tenant whose salt is another's first block would find what follows it."""
    first, rest = [1, 2, 3, 4], [5, 6, 7, 8]
    plain = block_pool.chained_digests([*first, *rest], 4)
    salt = np.array(first, "<i8").tobytes()
    for pretended in (salt, hashlib.sha256(salt).digest(), plain[0]):
        assert set(plain).isdisjoint(block_pool.chained_digests(rest, 4, pretended))
    assert block_pool.chained_digests(rest, 4, b"") == block_pool.chained_digests(rest, 4)
    salts = [0, -1, 1, 127, 128, -128, -129, 255, 256, "", b"", "0", b"0", "i", None, 2**64, -(2**64)]
    found = [block_pool.salt_bytes(salt, "test") for salt in salts]
    assert len({*found}) == len(salts)
