"""Names for arrays in signatures, where a docstring says which axes and dtypes they have.

Any library's array is taken without being imported, so to a type checker these names are `Any`: what an array has to
offer is looked for when it is read (`readers`).
"""

from __future__ import annotations

from typing import Any, TypeAlias

Array: TypeAlias = Any
"""An array of NumPy, torch, MLX, JAX or another library with DLPack, of Taichi or Quadrants, or a `CacheArray`.

For indices, lengths and positions a list is taken too, and where a docstring says so, a `Quantized` in place of an
array of numbers. Results are of the kind of the array that they are computed from, or a `CacheArray`.
"""

Arrays: TypeAlias = Any
"""One `Array`, or a tuple of several if an option such as ``return_lse`` asks for more."""
