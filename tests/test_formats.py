"""The table of formats: what each row says is what the reference makes, and what stores make room for."""

import ml_dtypes
import numpy as np
import pytest

from tikv import dtypes, formats, reference
from tikv.errors import DTypeError
from tikv.ops.quantize import quantize
from tikv.stores.row_format import RowFormat, appended

WIDTH = 128
KEPT = [row if isinstance(row, formats.GroupFormat) else row.stored for row in formats.FORMATS.values()]


def parts_by_reference(row, x):
    """Codes, and the arrays of scales and biases that a write finds."""
    if row.rule == "float8":
        return reference.encode(x, getattr(ml_dtypes, row.name)), []
    if row.rule == "int8":
        codes, *numbers = reference.quantize(x)
    else:
        scales = row.scale_dtypes[0].numpy
        codes, *numbers = reference.quantize_groups(x, row.bits, row.group, row.rule, scales)
    return codes, [part for part in numbers if part is not None]


@pytest.mark.parametrize("name", formats.FORMATS)
def test_a_row_says_what_the_reference_makes(rng, name):
    row, x = formats.FORMATS[name], rng.standard_normal((3, WIDTH)).astype(np.float32)
    codes, numbers = parts_by_reference(row, x)
    assert codes.dtype == row.stored.numpy
    assert codes[0].nbytes * 8 == WIDTH * row.bits
    assert sum(part[0].size for part in numbers) == row.numbers_of(WIDTH)
    assert row.finds_scales == bool(numbers)


@pytest.mark.parametrize("kept", KEPT, ids=str)
def test_a_store_makes_room_for_what_a_row_says(kept):
    form, row = RowFormat(kept, WIDTH), formats.format_of(kept)
    assert row is formats.FORMATS[str(row)]
    assert formats.OF_CODE[row.code] is row
    assert (form.stored, form.numbers) == (row.stored, row.numbers_of(WIDTH))
    assert form.nbytes * 8 == WIDTH * row.bits
    assert form.read_dtype is (dtypes.float32 if row.finds_scales else kept)
    assert set(appended(kept, divided=True)) == {"float32", "float16", "bfloat16"}


@pytest.mark.parametrize("kept", [dtype for dtype in dtypes.STORED if dtype not in KEPT], ids=str)
def test_other_dtypes_have_no_row(kept):
    assert formats.format_of(kept) is None
    assert RowFormat(kept, WIDTH).numbers == 0


@pytest.mark.parametrize("name", formats.FORMATS)
def test_scales_of_another_dtype_are_refused(name):
    row = formats.FORMATS[name]
    for dtype in dtypes.ALL:
        if dtype in row.scale_dtypes:
            assert row.check_scale_dtype(dtype, "example") is dtype
        else:
            with pytest.raises(
                DTypeError, match=f"example: scale_dtype {dtype.name} is not supported for {name}. Use "
            ):
                row.check_scale_dtype(dtype, "example")


@pytest.mark.parametrize("name", [name for name, row in formats.FORMATS.items() if not row.finds_scales])
def test_quantize_refuses_rows_whose_scale_a_caller_gives(arch, name):
    with pytest.raises(DTypeError, match=f"quantize: {name} has no scale for each row"):
        quantize(np.ones((2, WIDTH), np.float32), name)
