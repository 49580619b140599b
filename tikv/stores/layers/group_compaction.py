"""Compaction of groups along tokens: a group is kept or dropped as a whole, since its tokens share scales."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tikv.arrays import ArrayView, Host, Views
from tikv.errors import PositionError
from tikv.stores.history import History
from tikv.stores.layers.channel_codes import ChannelCodes
from tikv.stores.layers.compaction import copied_slots, kept_of, left_of, require_even
from tikv.stores.layers.contiguous import ContiguousLayers
from tikv.stores.layers.counts import Layer


class Coded(NamedTuple):
    """Which of the held tokens, in temporal order, are codes.

    Attributes:
        first: the first of them; `end` comes after the last.
        group: how many tokens a group has.
        gone: how many tokens of the oldest group are no longer held.
    """

    first: int
    end: int
    group: int
    gone: int = 0


def kept_groups(operation: str, index: Host, coded: Coded, named: Callable[[int], str]) -> Host:
    """A mask (rows, groups): which groups, from the oldest held, each row of ascending indices (rows, n) keeps.

    Raises:
        PositionError: a row keeps part of a group, or a group without all tokens before the first; `named` gives the
            row's name for the message.
    """
    rows, number = len(index), (coded.end - coded.first + coded.gone) // coded.group
    group = (index - coded.first + coded.gone) // coded.group + np.arange(rows)[:, None] * number
    is_code = (index >= coded.first) & (index < coded.end)
    counts = np.bincount(group[is_code], minlength=rows * number).reshape(rows, number)
    first = coded.first - coded.gone + np.arange(number) * coded.group
    sizes = first + coded.group - np.maximum(first, coded.first)
    parted = np.argwhere((counts > 0) & (counts < sizes))
    if parted.size:
        row, g = (int(i) for i in parted[0])
        raise PositionError(
            f"{operation}: {named(row)} cannot keep {counts[row, g]} of its tokens {max(first[g], coded.first)} to "
            f"{first[g] + coded.group - 1}, which share scales. Keep all or none of a group; tokens from {coded.end} "
            f"on are not codes yet, and any of them may be kept."
        )
    mask: Host = counts > 0
    fewer = np.flatnonzero(((index < coded.first).sum(axis=-1) < coded.first) & mask.any(axis=-1))
    if fewer.size:
        raise PositionError(
            f"{operation}: {named(int(fewer[0]))} cannot drop one of its {coded.first} sinks and keep groups of codes, "
            f"the first of which would take its place: sinks are not quantised. Keep all sinks, or no group."
        )
    return mask


class GroupChoice(NamedTuple):
    """What a layer with groups along tokens shall keep of its codes and of its newest rows.

    Attributes:
        groups: (batch, heads, m), numbered as in `ChannelCodes.tokens`.
        rows: (batch, heads, n), the ring's slots of the tokens that are kept as rows and move.
        fixed: how many tokens precede those: sinks that stay, and codes.
        oldest: the first token that is seen, if a window's oldest group is kept.
        history: the history of all heads.
    """

    groups: Host
    rows: Host
    fixed: int
    oldest: int
    history: History


def choose(operation: str, newest: ContiguousLayers, counts: Layer, codes: ChannelCodes, keep: Any) -> GroupChoice:
    """Check what a caller keeps of a layer, as `KVCacheStore.compact` says."""
    ring, group = newest.counts[counts.index], codes.group
    sinks, start = min(counts.length, ring.sinks), max(counts.valid_from, ring.sinks)
    coded_end = max(start, ring.sinks + codes.tokens) if codes.tokens else start
    gone = (start - ring.sinks) % group if coded_end > start else 0
    index = kept_of(operation, newest.memory, counts.held_rows(), keep)
    require_even(operation, counts, (index >= 0).sum(axis=-1), "tokens", "or use axis='head_dim'")
    batch, heads, n = index.shape
    rows = index.reshape(batch * heads, n)
    coded = Coded(sinks, sinks + coded_end - start, group, gone)
    mask = kept_groups(
        operation, rows, coded, lambda row: f"head {row % heads} of sequence {row // heads} in layer {counts.index}"
    )
    quantised = ((rows >= coded.first) & (rows < coded.end)).sum(axis=-1)
    require_even(operation, counts, quantised, "of the tokens that are codes", "or use axis='head_dim'")
    number = int(mask.sum(axis=-1).max(initial=0))
    groups = np.nonzero(mask)[1].reshape(batch, heads, number) + (start - ring.sinks) // group
    if gone and number and mask[0, 0]:  # tokens that are no longer seen stay with their group
        lost = np.broadcast_to(np.arange(sinks, sinks + gone), (batch, heads, gone))
        index = np.concatenate([index[..., :sinks], lost, index[..., sinks:] + gone], axis=-1)
    elif gone:
        index = np.where(index < sinks, index, index + gone)
    whole = copy.copy(counts)  # as if it still held all tokens of its oldest group
    whole.ring, whole.sinks, whole.valid_from = 0, ring.sinks, start - gone
    held = whole.held_rows()
    fixed = ring.sinks + number * group if number else 0
    positions = held.slots[0, 0][index[..., fixed:]]
    oldest = fixed - number * group + gone if gone and number and mask[0, 0] else 0
    return GroupChoice(groups, ring.slots_of(positions), fixed, oldest, left_of(counts, held, index))


class Copied(NamedTuple):
    """Copies of what a layer keeps: groups of codes, and rows if there are any."""

    codes: list[ArrayView]
    rows: list[ArrayView]


def copy_kept(
    operation: str, newest: ContiguousLayers, counts: Layer, codes: ChannelCodes, choice: GroupChoice
) -> Copied:
    """Copy what a layer shall keep."""
    memory, ring = newest.memory, newest.counts[counts.index]
    groups = codes.copied(operation, choice.groups, memory) if choice.groups.size else []
    rows = [copied_slots(operation, memory, a, choice.rows) for a in ring.arrays] if choice.rows.size else []
    return Copied(groups, rows)


def hold_only(
    operation: str, newest: ContiguousLayers, counts: Layer, codes: ChannelCodes, choice: GroupChoice, copied: Copied
) -> None:
    """Make a layer one to which only the kept tokens were ever appended."""
    memory = newest.memory
    codes.hold_only(copied.codes, choice.groups.shape[-1], memory)
    put_newest(operation, newest, counts.index, choice.fixed, copied.rows)
    memory.recount(counts, choice.history.tokens, choice.history, choice.oldest)


def put_newest(operation: str, newest: ContiguousLayers, layer: int, fixed: int, rows: Sequence[ArrayView]) -> None:
    """Make K and V (batch, heads, n, width), if any, the newest tokens of a layer, after `fixed` others."""
    ring = newest.counts[layer]
    newest.memory.recount(ring, fixed, None, fixed)
    if rows:
        newest.append(operation, layer, Views(rows), "head_major")
    ring.newest = 0
