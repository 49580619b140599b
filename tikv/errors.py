"""The exception tree: every refusal of this library is a `TikvError` and the Python class a caller would catch.

A message has three parts: the operation, what is wrong with the values, and what to do. It is raised before any write.
"""


class TikvError(Exception):
    """Base of every error this library raises on purpose."""


class ShapeError(TikvError, ValueError):
    """Arrays whose shapes, strides or memory do not fit each other or the operation."""


class DTypeError(TikvError, TypeError):
    """A dtype, or a pair of dtypes, that the operation does not convert."""


class CopyError(TikvError, TypeError):
    """An object that `copy` or `pickle` cannot copy; the message says which method can."""


class OptionError(TikvError, ValueError):
    """An unknown layout, mode, variant or other named choice."""


class CapacityError(TikvError, ValueError):
    """More tokens, blocks or elements than there is room for."""


class PositionError(TikvError, IndexError):
    """An index, position, slot or range outside of what exists."""


class ArchError(TikvError, RuntimeError):
    """A back end, device, driver or library that is missing or does not match."""


class MissingPackageError(ArchError, ImportError):
    """An optional package that the call needs but that is not installed; the message says what to install."""


class GroupError(TikvError, RuntimeError):
    """A process group that is missing or was destroyed, lost a process, or disagrees on a call."""


class StaleRuntimeError(TikvError, RuntimeError):
    """Memory or a compiled object of a runtime that no longer exists, or belongs to a parent process."""


class CacheFileError(TikvError, OSError):
    """A saved cache that is damaged, truncated, or was not written by this library."""
