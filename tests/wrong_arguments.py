"""Arguments that are wrong in one way each, and all that a call could have changed, read.

The files `test_wrong_arguments.py` give each function that writes every argument wrong in turn: it raises a `TikvError`
and leaves memory, lengths, block tables and free lists as they were.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import oracle

import tikv
from tikv import runtime
from tikv.arrays import ArrayView, CacheArray
from tikv.ops.plan import Plan
from tikv.runtime.cache import BoundedCache
from tikv.stores.locking import StoreLock
from tikv.stores.pools.tables import DeviceTables

HEADS, Q_HEADS, WIDTH, HUGE = 2, 4, 16, 10**30
TORCH = importlib.import_module("torch") if importlib.util.find_spec("torch") else None
ARRAYS = (CacheArray, np.ndarray, *([TORCH.Tensor] if TORCH else []))
Wrong = dict[str, Any]  # values of one argument, by what is wrong with them

NO_ARRAY: Wrong = {"None": None, "a number": 3, "a string": "rows", "a list": [[1.0]], "an object": object()}
NO_INTEGER: Wrong = {"None": None, "a fraction": 1.5, "a string": "2", "a bool": True, "a list": [1]}
NO_NUMBER: Wrong = {
    "NaN": float("nan"),
    "infinity": float("inf"),
    "a string": "1",
    "a list": [1.0],
    "an array": np.ones(2),
}
FLAG: Wrong = {"a string": "no", "a number": 2, "None": None, "a list": [True]}  # what True or False may not be
NO_LAYOUT: Wrong = {"unknown": "NCHW", "None": None, "a number": 1, "a list": ["token_major"]}

NO_ROPE = {
    "a string": "half",
    "an array": np.ones(WIDTH // 2, np.float32),
    "wide": tikv.Rope(np.ones(WIDTH, np.float32)),
}


class Scene(NamedTuple):
    """A call that is right, and what makes it wrong.

    Attributes:
        call: what is called, by keywords.
        arguments: with which it is right.
        changes: what it changes: stores and arrays.
        wrong: by argument, values that it may not have beside the others.
    """

    call: Callable[..., Any]
    arguments: dict[str, Any]
    changes: Sequence[Any]
    wrong: dict[str, Wrong]


def but(wrong: Wrong, *names: str) -> Wrong:
    """Wrong values without some that are right here."""
    assert set(names) <= wrong.keys(), names
    return {name: value for name, value in wrong.items() if name not in names}


def integers(low: int = 0, high: int | None = None) -> Wrong:
    """What an integer from `low` to `high` may not be."""
    found = {**NO_INTEGER, "too small": low - 1, "huge": HUGE}
    return found if high is None else {**found, "too large": high + 1}


def rows(array: np.ndarray, arch: str, heads: int | None = None, tokens: int | None = None) -> Wrong:
    """What rows to write, or queries, may not be.

    Args:
        array: which are right.
        arch: where they are placed.
        heads, tokens: their axes, where other arguments say how long those are.
    """
    place = lambda a: oracle.place(np.ascontiguousarray(a), arch)  # noqa: E731
    found = {
        **NO_ARRAY,
        "an axis more": place(array[None, None]),
        "two axes": place(array.reshape(-1, array.shape[-1])[:, :1]),
        "narrower": place(array[..., :-1]),
        "wider": place(np.concatenate([array, array], axis=-1)),
        "integers": place(array.astype(np.int32)),
        "bools": array.astype(bool),
        "complex": array.astype(np.complex64),
        "objects": array.astype(object),
        "columns apart": np.repeat(array, 2, axis=-1)[..., ::2],
        "masked": np.ma.masked_array(array),
    }
    if TORCH:
        found["without memory"] = oracle.to_torch(array.copy(), "cpu").to("meta")
    for name, axis in (("heads", heads), ("tokens", tokens)):
        if axis is not None:
            found[f"{name} missing"] = place(np.take(array, range(array.shape[axis] - 1), axis))
            found[f"{name} too many"] = place(np.concatenate([array, np.take(array, [0], axis)], axis))
    return found


def destination(array: Any, arch: str) -> Wrong:
    """What an array for a result, or a cache, may not be; the right one lies where `array` does."""
    host = oracle.to_numpy(array)
    made = rows(host, arch)
    fixed = host.copy()
    fixed.flags.writeable = False
    return {
        **but(made, "masked"),
        "read-only": fixed,
        "broadcast": np.broadcast_to(host[:1], host.shape)
        if host.shape[0] > 1
        else np.broadcast_to(host[..., :1], host.shape),
        "short": oracle.place(np.ascontiguousarray(host[..., :1]), arch),
    }


def index(array: np.ndarray, below: int | None = None) -> Wrong:
    """What an array of integers may not be; `below`: each is less."""
    flat = np.asarray(array)
    found = {
        "floats": flat.astype(np.float32),
        "bools": flat.astype(bool),
        "an axis more": flat[None, None],
        "a string": "abc",
        "an object": object(),
        "uneven lists": [[1], [1, 2]],
        "strings": ["a"] * flat.size,
        "too long": np.concatenate([flat, flat[-1:]]) if flat.size else [0],
        "huge numbers": np.full(flat.shape, HUGE, object),
    }
    if below is not None:
        found["too large"] = np.full_like(flat, below)
    return found


def of_scores(arch, batch, tokens):
    """What the options of attention may not be, of so many sequences and queries each."""
    ones = lambda *shape: oracle.place(np.ones(shape, np.float32), arch)  # noqa: E731
    parents = lambda value: np.full((batch, tokens), value, np.int32)  # noqa: E731
    return {
        "scale": NO_NUMBER,
        "softcap": {**NO_NUMBER, "zero": 0.0, "negative": -1.0},
        "sink_logits": {
            **but(NO_ARRAY, "None"),
            "short": ones(Q_HEADS - 1),
            "integers": np.ones(Q_HEADS, np.int32),
            "two axes": ones(1, Q_HEADS),
        },
        "alibi_slopes": {
            **but(NO_ARRAY, "None"),
            "short": ones(Q_HEADS - 1),
            "three axes": ones(1, 1, Q_HEADS),
            "another batch": ones(batch + 1, Q_HEADS),
        },
        "mask": {
            **but(NO_ARRAY, "None"),
            "floats": np.ones((batch, tokens, tokens), np.float32),
            "another batch": np.ones((batch + 1, tokens, tokens), bool),
            "two axes": np.ones((batch, tokens), bool),
            "wide bits": np.ones((batch, tokens, 9), np.uint8),
        },
        "parents": {
            **but(NO_ARRAY, "None"),
            "floats": np.zeros((batch, tokens), np.float32),
            "uneven": [[0], [0, 1]],
            "later": parents(tokens),
            "below": parents(-2),
            "one axis": np.full(tokens, -1, np.int32),
            "another batch": np.full((batch + 1, tokens), -1, np.int32),
        },
        "return_lse": FLAG,
        "return_mass": FLAG,
        "mass_into": {**but(NO_ARRAY, "None"), "needs return_mass": np.zeros((batch, 1, 1), np.float32)},
        "mass_queries": {**but(NO_INTEGER, "None"), "zero": 0, "negative": -1, "needs return_mass": 1},
    }


def contents(*things: Any) -> list[Any]:
    """All numbers, names and bytes that are reached from these, in one order."""
    found: list[Any] = []
    _read(things, found, set())
    return found


_SKIPPED = (BoundedCache, DeviceTables, Plan, StoreLock, runtime.Runtime, type(runtime), type, tikv.NormRope)

_NOTES = {"_known"}  # what calls note of what they found, so that later ones need not look again


def _read(thing: Any, found: list[Any], seen: set[int]) -> None:
    if thing is None or isinstance(thing, bool | int | float | str | bytes | np.dtype):
        found.append(thing)
        return
    if isinstance(thing, _SKIPPED) or callable(thing) or id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, ArrayView):
        found.append(CacheArray(thing, runtime.current()).copy_to_host().tobytes())
    elif isinstance(thing, ARRAYS):
        found.append(oracle.to_numpy(thing).tobytes())
    elif isinstance(thing, dict):
        for key, value in thing.items():
            found.append(repr(key))
            _read(value, found, seen)
    elif isinstance(thing, list | tuple | set | frozenset | range):
        found.append(len(thing))
        for value in sorted(thing) if isinstance(thing, set | frozenset) else thing:
            _read(value, found, seen)
    elif type(thing).__module__.startswith("tikv."):
        found.append(type(thing).__name__)
        for name, value in vars(thing).items():
            if name in _NOTES:
                continue
            found.append(name)
            _read(value, found, seen)


def filled(store: Any, rng: np.random.Generator) -> Any:
    """The store, all of its keys and values random bytes of finite numbers, so that whatever is written shows."""
    for layer in range(store.num_layers):
        for array in (store.keys(layer), store.values(layer)):
            if array.device == "cpu":
                held = array.numpy().view(np.uint8)
                held[...] = rng.integers(1, 100, held.shape)
            else:
                bits = array.torch().view(TORCH.uint8)
                bits.copy_(TORCH.from_numpy(rng.integers(1, 100, tuple(bits.shape)).astype(np.uint8)))
    return store


def problems_of(make: Callable[[], Scene]) -> list[str]:
    """Calls of the scene with one wrong argument that were taken, changed something, or raised a foreign error."""
    found: list[str] = []
    scene = make()
    before = contents(*scene.changes)
    for argument, wrong in scene.wrong.items():
        for what, value in wrong.items():
            said = "was taken"
            try:
                scene.call(**{**scene.arguments, argument: value})
            except tikv.TikvError:
                said = ""
            except Exception as error:
                said = f"raised {type(error).__name__}: {error!s:.200}"
            changed = contents(*scene.changes) != before
            if said or changed:
                found.append(f"{argument} ({what}) {said}{', and something changed' * changed}")
                scene = make()
                before = contents(*scene.changes)
    scene.call(**scene.arguments)
    if contents(*scene.changes) == before:
        found.append("the right call changed nothing")
    return found
