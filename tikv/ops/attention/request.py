"""AttendRequest: what is asked of attention over a cache, one field for each option that callers have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from tikv.errors import OptionError
from tikv.formats import GroupFormat
from tikv.ops import checks
from tikv.ops.attention.options import IMPLEMENTATIONS, AttentionOptions, real
from tikv.ops.attention.terms import NO_TERMS, UNCOUNTED, Terms

MISSING = ("raise", "ignore")


class AttentionScale(NamedTuple):
    """What turns products of queries and keys into scores."""

    scale: float | None
    softcap: float | None

    @classmethod
    def checked(cls, scale: Any, softcap: Any, operation: str) -> AttentionScale:
        """The numbers that a caller gave."""
        return cls(real(scale, "scale", operation), real(softcap, "softcap", operation))


def mass_queries_of(
    return_mass: Any, mass_queries: Any, terms: Terms, operation: str, keys: GroupFormat | None = None
) -> int | None:
    """Over how many of the last queries the mass is wanted: None for all of them, 0 for no mass.

    Raises:
        PositionError: less than one.
        OptionError: a number, and no mass is wanted; or the mass of scores with slopes, or of a tree, or of keys in
            groups of codes.
    """
    if return_mass is False and mass_queries is None:
        return 0
    return_mass = checks.flag(return_mass, "return_mass", operation)
    given = [name for name, array in terms._asdict().items() if array is not None]
    uncounted = [name for name in given if name in UNCOUNTED]
    if return_mass and keys is not None:
        raise OptionError(f"{operation}: the mass of keys of {keys} is not offered. Leave return_mass out.")
    if return_mass and uncounted:
        raise OptionError(f"{operation}: return_mass counts no {uncounted[0]}. Ask for one of the two.")
    if mass_queries is None:
        return None if return_mass else 0
    if not return_mass:
        raise OptionError(f"{operation}: mass_queries={mass_queries} without return_mass=True. Ask for the mass too.")
    return checks.integer(mass_queries, "mass_queries", operation, low=1)


class AttendRequest(NamedTuple):
    """The options of one call of attention as a caller gave them, as `decode_attention` and `KVCacheStore.attend` do.

    A public function lists them as keywords and makes this of them; whatever stores tokens reads what it can serve and
    refuses the others by `refuse`. `newer` and `short` are those of `AttentionOptions`.
    """

    layout: str = "token_major"
    scale: Any = None
    softcap: Any = None
    window: Any = None
    return_lse: Any = False
    impl: str = "auto"
    out: Any = None
    seq_lens: Any = None
    missing: str = "raise"
    sink_logits: Any = None
    alibi_slopes: Any = None
    return_mass: Any = False
    mass_queries: Any = None
    mask: Any = None
    parents: Any = None
    causal: Any = True
    num_splits: Any = None
    lse_base2: Any = False
    newer: int = 0
    short: bool = False
    indices: Any = None

    def checked(self, operation: str) -> AttendRequest:
        """These options, whose choices are names and whose flags are True or False.

        Raises:
            OptionError: one is not.
        """
        checks.name(self.layout, "layout", operation, checks.LAYOUTS)
        if type(self.return_lse) is bool and type(self.return_mass) is bool:
            return self
        flags: dict[str, Any] = {
            name: checks.flag(getattr(self, name), name, operation) for name in ("return_lse", "return_mass")
        }
        return self._replace(**flags)

    @property
    def terms(self) -> Terms:
        """What is added to the scores, which of the new tokens queries see, and which tokens they read."""
        if self.sink_logits is self.alibi_slopes is self.mask is self.parents is self.indices is None:
            return NO_TERMS
        return Terms(self.sink_logits, self.alibi_slopes, self.mask, self.parents, self.indices)

    def options(self, operation: str, mass: Any = False) -> AttentionOptions:
        """What a plan is made for, checked but for the window, which stands where what is behind the sinks will.

        `mass` is whether the mass of each slot is wanted.

        Raises:
            OptionError: an option is of another type.
        """
        return AttentionOptions(
            real(self.scale, "scale", operation),
            checks.flag(self.causal, "causal", operation),
            checks.integer_or_none(self.window, "window", operation),
            real(self.softcap, "softcap", operation),
            checks.integer_or_none(self.num_splits, "num_splits", operation),
            checks.flag(self.lse_base2, "lse_base2", operation),
            checks.flag(mass, "return_mass", operation),
            self.newer,
            self.short,
        )

    def scores(self, operation: str) -> AttentionScale:
        """The scale and the soft cap, checked."""
        return AttentionScale.checked(self.scale, self.softcap, operation)

    def check_choices(self, operation: str, impl: Iterable[str] = IMPLEMENTATIONS) -> None:
        """`impl` and `missing` are some that there are.

        Raises:
            OptionError: they are not.
        """
        checks.option(self.impl, "impl", operation, tuple(impl))
        checks.option(self.missing, "missing", operation, MISSING)

    def asked_mass(self, operation: str, keys: GroupFormat | None = None) -> int | None:
        """`mass_queries_of` these options.

        Raises:
            PositionError, OptionError: as there; the mass with lengths on the device.
        """
        wanted = mass_queries_of(self.return_mass, self.mass_queries, self.terms, operation, keys)
        if wanted and self.indices is not None:
            raise OptionError(
                f"{operation}: mass_queries={wanted} with indices, whose mass is of each query. Take that of the last."
            )
        if wanted != 0 and self.seq_lens is not None:
            raise OptionError(
                f"{operation}: return_mass with seq_lens: the mass is of the tokens that the store counts."
            )
        return wanted

    def refuse(self, operation: str, names: Iterable[str], why: str, remedy: str) -> None:
        """None of these options is asked for.

        Raises:
            OptionError: one is.
        """
        for name in names:
            if (value := getattr(self, name)) is not None and value is not False:
                raise OptionError(f"{operation}: {why} {name}. {remedy}")
