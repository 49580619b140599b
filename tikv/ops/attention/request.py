"""AttendRequest: the options of attention over a cache, one field for each option of the public functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from tikv.arrays import Array
from tikv.errors import OptionError, ShapeError
from tikv.ops import checks
from tikv.ops.attention.mass import NO_MASS, Mass, mass_choice, mass_kind
from tikv.ops.attention.options import IMPLEMENTATIONS, AttentionOptions, real
from tikv.ops.attention.terms import NO_TERMS, UNCOUNTED, Terms
from tikv.runtime.cache import BoundedCache

MISSING = ("raise", "ignore")
SHARED_PREFIX = ("auto", "off")


class AttentionScale(NamedTuple):
    """What turns products of queries and keys into scores."""

    scale: float | None
    softcap: float | None


class AttendRequest(NamedTuple):
    """The options of one call of attention as a caller gave them, as `decode_attention` and `KVCacheStore.attend` do.

    A public function lists them as keywords and collects them in this class; each store reads the options that it
    supports, and refuses the others with `refuse`. `newer` and `short` are those of `AttentionOptions`.
    """

    layout: str = "token_major"
    scale: Any = None
    softcap: Any = None
    return_lse: Any = False
    impl: str = "auto"
    window: Any = None
    missing: str = "raise"
    return_mass: Any = False
    mass_queries: Any = None
    causal: Any = True
    num_splits: Any = None
    lse_base2: Any = False
    newer: int = 0
    short: bool = False
    shared_prefix: str = "off"
    keep: Any = True
    block: Any = None
    # The fields from here on are arrays; those before are `choices`.
    out: Array | None = None
    seq_lens: Array | int | None = None
    sink_logits: Array | None = None
    alibi_slopes: Array | None = None
    mask: Array | None = None
    parents: Array | None = None
    indices: Array | None = None
    mass_into: Array | None = None

    @property
    def choices(self) -> tuple[Any, ...]:
        """The options other than arrays: once `checked`, calls of one form have equal ones."""
        return self[:CHOICES]

    def checked(self, operation: str) -> AttendRequest:
        """These options, with each choice converted to its type: a str, a bool, a float, an int, or None.

        Raises:
            OptionError, DTypeError: one cannot be converted.
        """
        types = tuple(map(type, self[:CHOICES]))
        if types in _checked_types:
            return self
        converted = self._replace(
            layout=checks.name(self.layout, "layout", operation, checks.LAYOUTS),
            scale=real(self.scale, "scale", operation),
            softcap=real(self.softcap, "softcap", operation),
            window=checks.integer_or_none(self.window, "window", operation),
            return_lse=checks.flag(self.return_lse, "return_lse", operation),
            impl=checks.name(self.impl, "impl", operation, IMPLEMENTATIONS),
            missing=checks.name(self.missing, "missing", operation, MISSING),
            return_mass=mass_choice(self.return_mass, operation),
            mass_queries=checks.integer_or_none(self.mass_queries, "mass_queries", operation),
            causal=checks.flag(self.causal, "causal", operation),
            num_splits=checks.integer_or_none(self.num_splits, "num_splits", operation),
            lse_base2=checks.flag(self.lse_base2, "lse_base2", operation),
            keep=checks.flag(self.keep, "keep", operation),
            block=checks.integer_or_none(self.block, "block", operation),
            shared_prefix=checks.name(self.shared_prefix, "shared_prefix", operation, SHARED_PREFIX),
        )
        _checked_types.keep(tuple(map(type, converted.choices)), True)
        return converted

    @property
    def terms(self) -> Terms:
        """The terms added to the scores, the new tokens that each query sees, and the tokens that it reads."""
        if self.sink_logits is self.alibi_slopes is self.mask is self.parents is self.indices is None:
            return NO_TERMS
        return Terms(self.sink_logits, self.alibi_slopes, self.mask, self.parents, self.indices)

    def options(self, mass: str = "") -> AttentionOptions:
        """The options that a plan is made for, from `checked` options. `span` is the given window, sinks included.

        `mass` says which mass of each slot the attention itself gives.
        """
        return AttentionOptions(
            self.scale, self.causal, self.window, self.softcap, self.num_splits, self.lse_base2, mass, self.newer,
            self.short,
        )  # fmt: skip

    @property
    def scores(self) -> AttentionScale:
        """The scale and the soft cap."""
        return AttentionScale(self.scale, self.softcap)

    def check_choices(self, operation: str, impl: Iterable[str] = IMPLEMENTATIONS) -> None:
        """Check that `impl`, `missing` and `shared_prefix` are among their choices.

        Raises:
            OptionError: they are not.
        """
        checks.option(self.impl, "impl", operation, tuple(impl))
        checks.option(self.missing, "missing", operation, MISSING)
        checks.option(self.shared_prefix, "shared_prefix", operation, SHARED_PREFIX)

    def asked_mass(self, operation: str) -> Mass:
        """The mass that these `checked` options ask for.

        Raises:
            PositionError: `mass_queries` is less than one.
            OptionError: `mass_queries` or `mass_into` are given but no mass is asked for; or one is asked for with
                lengths on the device, slopes or a tree; or of some of the queries, or in an array, with indices.
        """
        queries: int | None = self.mass_queries
        if self.return_mass is False and queries is None and self.mass_into is None:
            return NO_MASS
        kind = mass_kind(self.return_mass, operation)
        if not kind:
            name, shown = ("mass_into", "mass_into") if queries is None else ("mass_queries", f"mass_queries={queries}")
            raise OptionError(f"{operation}: {shown} needs return_mass=True. Pass it too, or leave {name} out.")
        uncounted = [name for name, a in self.terms._asdict().items() if a is not None and name in UNCOUNTED]
        if uncounted:
            raise OptionError(f"{operation}: return_mass cannot be combined with {uncounted[0]}. Pass one of the two.")
        if queries is not None:
            queries = checks.integer(queries, "mass_queries", operation, low=1)
            if kind == "last":
                raise OptionError(
                    f"{operation}: return_mass='last' counts the newest query alone, and mass_queries={queries} is "
                    "given. Leave mass_queries out, or use 'sum' or 'max'."
                )
        if self.indices is not None and (queries is not None or kind == "last" or self.mass_into is not None):
            shown = f"mass_queries={queries}" if queries is not None else "mass_into"
            shown = "return_mass='last'" if kind == "last" else shown
            raise OptionError(
                f"{operation}: {shown} cannot be combined with indices, which return the mass of each query. "
                "Use return_mass=True or 'max' alone, and take the rows."
            )
        if self.seq_lens is not None:
            raise OptionError(
                f"{operation}: return_mass cannot be combined with seq_lens: the mass covers the tokens that the "
                "store counts. Leave one of them out."
            )
        return Mass(kind, 1 if kind == "last" else queries, self.mass_into)

    def in_block(self, operation: str, tokens: int) -> int:
        """How many of so many queries, the newest, see each other both ways; 0 without a block.

        Raises:
            PositionError: `block` is less than one.
            OptionError: something else says too which of the newest tokens a query sees, or how far they are.
        """
        if self.block is None:
            return 0
        block: int = checks.integer(self.block, "block", operation, low=1)
        for name, a in self.terms._asdict().items():
            if a is not None and name in UNCOUNTED:
                raise OptionError(f"{operation}: block cannot be combined with {name}. Pass one of the two.")
        return min(block, tokens)

    def as_block(self, operation: str, queries: int) -> int:
        """As `in_block`, for queries that have to be those of the block alone.

        Raises:
            ShapeError: there are more.
        """
        block = self.in_block(operation, queries)
        if 0 < block < queries:
            raise ShapeError(
                f"{operation}: {queries} queries are given with block={block}. Attend with those of the block alone, "
                "or use extend()."
            )
        return block

    def refuse(self, operation: str, names: Iterable[str], why: str, remedy: str) -> None:
        """Refuse these options.

        Raises:
            OptionError: one of them is given.
        """
        for name in names:
            if (value := getattr(self, name)) is not None and value is not False:
                raise OptionError(f"{operation}: {why} {name}. {remedy}")


CHOICES = AttendRequest._fields.index("out")
_checked_types: BoundedCache[tuple[type, ...], bool] = BoundedCache()  # types that need no conversion
