"""Which blocks of a pool are free, who holds the others, and which hold a prompt prefix that another may share.

Bookkeeping on the host alone: no data moves here. A block is held by any number of sequences; one that nobody holds is
free. A full block may be registered under the digest of all tokens up to its end, and is found by it even after it was
freed, until it is taken for something else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tikv.arrays import Host
from tikv.errors import CapacityError, DTypeError

MOST_SALT = 1024  # bytes; it is kept with each sequence and in files


def salt_bytes(salt: Any, operation: str) -> bytes:
    r"""A user's salt as bytes, no two salts as the same ones: 1, "1" and b"1" are three. None gives no bytes.

    Raises:
        DTypeError: it is not a str, bytes or int.
        CapacityError: it is longer than `MOST_SALT`.

    Examples:
        >>> salt_bytes(None, "example"), salt_bytes("a", "example"), salt_bytes(-1, "example")
        (b'', b'sa', b'i\xff')
    """
    if salt is None:
        return b""
    if isinstance(salt, str):
        found = b"s" + salt.encode("utf-8", "surrogatepass")
    elif isinstance(salt, bytes):
        found = b"b" + salt
    elif isinstance(salt, int | np.integer) and not isinstance(salt, bool):
        number = int(salt)
        bits = (number if number >= 0 else ~number).bit_length()
        found = b"i" + number.to_bytes(bits // 8 + 1, "little", signed=True)
    else:
        raise DTypeError(f"{operation}: salt is {salt!r}, a {type(salt).__name__}. Use a str, bytes or an int.")
    if len(found) > MOST_SALT:
        raise CapacityError(
            f"{operation}: salt has {len(found)} bytes; at most {MOST_SALT} are kept. Give a hash of it."
        )
    return found


def chained_digests(token_ids: Sequence[int] | Host, block_size: int, salt: bytes = b"") -> list[bytes]:
    """A digest for each full block of a token list, which depends on all tokens up to the block's end.

    Args:
        token_ids: integers of at most 64 bits.
        block_size: tokens of a block; a last block that is not full has no digest.
        salt: as `salt_bytes` gives it; digests of different salts are never equal.

    Returns:
        SHA-256 of the previous block's digest and this block's tokens: equal digests mean equal prefixes. Before the
        first block stands a digest of the salt, if there is one.

    Cost: about 1 us a block.

    Examples:
        >>> a, b = chained_digests([1, 2, 3, 4, 5], 2), chained_digests([9, 2, 3, 4], 2)
        >>> len(a), a[1] == b[1], a[1] == chained_digests([1, 2, 3, 4], 2)[1]
        (2, False, True)
        >>> a[0] == chained_digests([1, 2], 2, b"tenant")[0]
        False
    """
    ids = np.asarray(token_ids, np.int64)
    digest, found = b"", []
    if salt:
        # Of 36 bytes, which no block's are: those are a multiple of 8, so a salt cannot pass for tokens.
        digest = hashlib.sha256(hashlib.sha256(salt).digest() + b"salt").digest()
    for end in range(block_size, len(ids) + 1, block_size):
        digest = hashlib.sha256(digest + ids[end - block_size : end].astype("<i8").tobytes()).digest()
        found.append(digest)
    return found


def slots_of(block_table: Sequence[int], positions: Host, block_size: int) -> Host:
    """The slot in the pool of each position of a sequence whose blocks are ``block_table``.

    Examples:
        >>> slots_of([3, 1], np.array([0, 4, 5]), 4).tolist()
        [12, 4, 5]
    """
    found: Host = np.asarray(block_table, np.int32)[positions // block_size] * block_size + positions % block_size
    return found


class BlockPool:
    """Reference counts and free lists of ``num_blocks`` blocks.

    Freed blocks are taken again last in, first out, beginning with block 0. Those registered under a digest, if no
    other block is, are taken last, the longest unused first, and then lose it.

    Args:
        num_blocks: blocks there are.

    Examples:
        >>> pool = BlockPool(4)
        >>> a = pool.allocate(2)
        >>> pool.acquire(a[:1])
        >>> a, pool.holders(0), pool.num_free, pool.num_shared
        ([0, 1], 2, 2, 1)
        >>> pool.register(1, b"prefix")
        >>> pool.release(a)
        >>> pool.num_free, pool.find(b"prefix"), pool.allocate(2)
        (3, 1, [2, 3])
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: dict[int, None] = {}  # free, but still found by digest; the longest unused first
        self._blocks_of: dict[bytes, dict[int, None]] = {}  # in the order they were registered
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free) + len(self._idle)

    @property
    def num_shared(self) -> int:
        """Blocks that more than one sequence holds."""
        return sum(n > 1 for n in self._holders)

    def holders(self, block: int) -> int:
        """How many hold a block."""
        return self._holders[block]

    def allocate(
        self, n: int, operation: str = "BlockPool.allocate", lost: dict[int, bytes] | None = None
    ) -> list[int]:
        """Take ``n`` free blocks, each with one holder, or CapacityError where fewer are free.

        ``lost`` is told the digests under which they were registered, for `give_back`.
        """
        if n > self.num_free:
            raise CapacityError(
                f"{operation}: {n} blocks are needed and {self.num_free} of {self.num_blocks} are free. Free, truncate "
                f"or swap out a sequence, or make the pool larger."
            )
        found = self._free[-n:][::-1] if n else []
        del self._free[len(self._free) - len(found) :]
        for _ in range(n - len(found)):
            block = next(iter(self._idle))
            del self._idle[block]
            if lost is not None:
                lost[block] = self._digest_of[block]
            self.forget(block)
            found.append(block)
        for block in found:
            self._holders[block] = 1
        return found

    def give_back(self, blocks: Sequence[int], lost: dict[int, bytes]) -> None:
        """Undo an `allocate`: those that ``lost`` a digest and were not written get it back and are taken as before."""
        for block, digest in lost.items():
            self.register(block, digest)
        self.release(blocks)
        self._idle = {block: None for block in lost if block in self._idle} | self._idle

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more holder for each block; a registered one that nobody holds is revived."""
        holders = self._holders
        for block in blocks:
            if holders[block] == 0:
                del self._idle[block]
            holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each block of a sequence, given in its order; those that nobody holds then are free.

        The last is freed first, so that the first is taken again first, and a prefix outlives what follows it.
        """
        holders = self._holders
        for block in reversed(blocks):
            holders[block] = left = holders[block] - 1
            if left == 0:
                digest = self._digest_of.get(block)
                if digest is not None and len(self._blocks_of[digest]) == 1:
                    self._idle[block] = None
                    continue
                if digest is not None:
                    self.forget(block)  # another has the same tokens
                self._free.append(block)

    def register(self, block: int, digest: bytes) -> None:
        """Let a full block that is held be found by its digest, unless it is found by one already."""
        if block not in self._digest_of:
            self._blocks_of.setdefault(digest, {})[block] = None
            self._digest_of[block] = digest

    def forget(self, block: int) -> None:
        """A held block's data is about to change: it is not found by its digest any more."""
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            same = self._blocks_of[digest]
            del same[block]
            if not same:
                del self._blocks_of[digest]

    def find(self, digest: bytes) -> int | None:
        """A block registered under a digest, a held one if there is any; `acquire` it before anything is allocated."""
        same = self._blocks_of.get(digest)
        if same is None:
            return None
        return next((block for block in same if self._holders[block]), next(iter(same)))

    def prefix(self, digests: Iterable[bytes]) -> list[int]:
        """The registered blocks of the longest run of digests from the first on."""
        found = []
        for digest in digests:
            block = self.find(digest)
            if block is None:
                break
            found.append(block)
        return found
