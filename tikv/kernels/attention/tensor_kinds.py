"""Which module makes fragments of tensor cores from what a cache is kept as."""

from tikv.kernels.attention import tensor_codes, tensor_floats, tensor_halves
from tikv.kernels.attention.tensor_instructions import HALVES


def kind_of(cache):
    """The module for K and V of a dtype or a format: it has `make_fragments` and `make_value_at`."""
    if cache in HALVES:
        return tensor_halves
    return tensor_floats if cache in tensor_floats.KINDS else tensor_codes
