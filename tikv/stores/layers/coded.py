"""The arrays of codes of each form of older tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from tikv.arrays import ArrayView
from tikv.stores.layers.coded_arrays import CodedArrays
from tikv.stores.layers.coded_rows import CodedRows
from tikv.stores.layers.coded_tiles import CodedTiles
from tikv.stores.layers.token_group_form import OlderForm, RowForm, TileForm

Coded: TypeAlias = CodedArrays | CodedRows | CodedTiles


def coded(form: OlderForm, arrays: Sequence[ArrayView]) -> Coded:
    """What writes and reads codes of this form in these arrays."""
    if isinstance(form, TileForm):
        return CodedTiles(form, *arrays)
    return CodedRows(form, *arrays) if isinstance(form, RowForm) else CodedArrays(form, *arrays)
