"""Which module makes fragments of tensor cores from K and V of a dtype or a format."""

from tikv.kernels.attention.sm80 import coded, floats, halves
from tikv.kernels.attention.sm80.instructions import HALVES


def kind_of(cache):
    """The module for K and V of a dtype or a format: it has `make_fragments` and `make_value_at`."""
    if cache in HALVES:
        return halves
    return floats if cache in floats.KINDS else coded
