"""What is known of the newest tokens of a store or of a sequence when `commit` keeps some of them.

`extend(parents=)` is told the tree of its tokens, so `commit` keeps of them only a path from the root. Of other tokens
it keeps any, since a mask may have said what each of them saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes
from tikv.arrays import ArrayView, Host, new_array, read_host
from tikv.errors import PositionError
from tikv.ops.indices import host_indices
from tikv.ops.layouts import Rows
from tikv.ops.row_copy import bind_copies
from tikv.runtime import Runtime


class Parents:
    """A copy of the parents (B, T) of a call, which reads them back when they are asked for.

    The copy stays on the device: a decode loop must not wait for it.
    """

    def __init__(self, operation: str, parents: ArrayView, live: Runtime) -> None:
        known, self._runtime = host_indices(parents, live), live
        self._there: ArrayView | None = None
        self._known: Host | None = None if known is None else np.array(known)
        if known is None and parents.ndim == 2 and parents.dtype in (dtypes.int32, dtypes.int64):  # else it is refused
            self._there = to = new_array(parents.shape, parents.dtype, live)
            src, dst = (Rows(a, sequence=a.strides[0], token=a.strides[1]) for a in (parents, to))
            sizes = {"groups": parents.shape[0], "heads": 1, "tokens": parents.shape[1]}
            for each in bind_copies(live, operation, src=[src], dst=[dst], widths=[1], **sizes):
                each.bound.launch()

    def __deepcopy__(self, memo: dict[int, Any]) -> Parents:
        return self  # nothing changes it

    @property
    def host(self) -> Host:
        """The parents, (B, T)."""
        if self._known is None:
            assert self._there is not None, "extend() refuses other arrays"
            self._known, self._there = read_host(self._there, self._runtime), None
        return self._known


class Draft(NamedTuple):
    """The newest tokens of each sequence of a batch; tokens are counted from 0.

    Attributes:
        settled: how many tokens a commit has decided about.
        first, end: the tokens of the newest tree.
        parents: those of the tree; None without a tree.
        rows: which row of `parents` belongs to each sequence.
    """

    settled: int = 0
    first: int = 0
    end: int = 0
    parents: Parents | None = None
    rows: tuple[int, ...] = ()

    def cut(self, length: int) -> Draft:
        """The draft after only the first `length` tokens were kept."""
        if length >= max(self.end, self.settled):
            return self
        if length <= self.first:
            return Draft(min(self.settled, length))
        return self._replace(settled=min(self.settled, length), end=min(self.end, length))

    def of_sequences(self, index: Sequence[int]) -> Draft:
        """The draft of these sequences of the batch."""
        return self if self.parents is None else self._replace(rows=tuple([self.rows[i] for i in index]))

    def tokens(self, operation: str, newest: int, drafted: int | None, length: int, of: str = "") -> int:
        """How many of `length` tokens were drafted; None: the `newest`, which the last append brought.

        PositionError if nothing was appended, or a commit has decided about some of them. `of` names a sequence.
        """
        since = length - self.settled
        if self.settled and (since == 0 if drafted is None else drafted > since):
            asked = "nothing" if since == 0 else f"only {since} of the {drafted} drafted tokens"
            raise PositionError(
                f"{operation}: {asked} was appended{of} since the last commit, and what that kept is not a draft "
                f"any more. Append the next draft first."
            )
        if drafted is None and newest == 0:
            raise PositionError(
                f"{operation}: nothing was appended{of} since tokens were last dropped. Pass the number of drafted "
                f"tokens as drafted=."
            )
        return newest if drafted is None else drafted

    def check(self, operation: str, paths: Sequence[Host], drafted: int, length: int, number: int = 0) -> None:
        """Raise PositionError if a path keeps tokens of the tree that are not a path from its root.

        `paths` has one for each sequence, of indices among the `drafted` newest of `length` tokens; `number` is that of
        the first in the caller's list.
        """
        start = length - drafted
        if self.parents is None or self.end <= start:
            return
        before = range(self.first, start)  # tokens of the tree that stay, since the call is not about them
        for b, (row, path) in enumerate(zip(self.rows, paths, strict=True), number):
            parents, last = self.parents.host[row], -1
            for t in before:
                last = self._child(operation, f"token {t} before the draft", t - self.first, parents, last)
            for i, token in enumerate((path + start).tolist()):
                if not self.first <= token < self.end:
                    continue
                if last < 0 and i < self.first - start:
                    raise PositionError(
                        f"{operation}: path[{b}, {i}]={int(path[i])} is in the tree of extend(), whose tokens see all "
                        f"{self.first - start} drafted tokens before it, and {i} of these are kept. Keep all of them, "
                        f"or none of the tree."
                    )
                name = f"path[{b}, {i}]={int(path[i])}"
                last = self._child(operation, name, token - self.first, parents, last)

    @staticmethod
    def _child(operation: str, name: str, node: int, parents: Host, last: int) -> int:
        """The node, if the node kept before it is its parent."""
        if parents[node] != last:
            raise PositionError(
                f"{operation}: {name} does not continue the path: in the tree of extend(), the parent of token {node} "
                f"is {int(parents[node])}, not {last}. Keep tokens of which the first has the parent -1, and each is "
                f"the parent of the next."
            )
        return node
