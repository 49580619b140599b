"""Lives chosen by a seed, and a failing one made as short as it can be."""

import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lives import families, life
from lives.families import FAMILIES, FULL

FORMATS = (
    "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "q8_0", "q4_0", "mxfp8", "mxfp4", "nvfp4",
    "quant2_32", "quant3_32", "quant4_32", "quant8_32",
    "quant4_32_hadamard", "tokens2_32", "tokens4_32", "older4_32", "kvarn_k4v2_g64", "kvarn_k4v4_g64",
)  # fmt: skip
WINDOWS = ((8, 2), (8, 0), (5, 3), (12, 4), (1, 0), (40, 4))
KINDS = {  # how often each kind of operation comes, of about 60
    "tokens": 8, "steps": 10, "compiled": 8, "crop": 8, "attention": 5, "reorder": 2, "repeat": 2, "select": 2,
    "copy": 2, "swap": 2, "save": 2, "begin": 2, "reset": 1, "empty": 1, "record": 1, "interrupt": 3, "beyond": 1,
    "snapshot": 3, "restore": 4, "fork": 1,
}  # fmt: skip
OPERATIONS = 24
NARROW = ("float16", "bfloat16")  # of models
SCALES = ("k_scale", "v_scale")
FIXED_SCALES = (0.5, 0.11, 2.0)


class Chosen(NamedTuple):
    """A life as plain data; its repr makes it again."""

    family: str
    options: dict[str, Any]
    operations: list[tuple[Any, ...]]

    def live(self, folder: pathlib.Path) -> life.Life:
        return life.live(self.family, self.options, self.operations, folder)


def choose(
    rng: np.random.Generator,
    only: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    formats: tuple[str, ...] = FORMATS,
) -> Chosen:
    """A life of one of these families, or of any, without these kinds of operations; "padding" counts as one."""
    names = list(only or families.offered())
    family = names[rng.integers(len(names))]
    # A life has only a part of all kinds: what two of them do to each other is then tried more often.
    kinds = {k: n for k, n in KINDS.items() if k not in without and rng.random() < 0.7}
    kinds = kinds or {"steps": 1}
    padded = "padding" not in without
    weights = np.array([*kinds.values()], float)
    operations = [_operation(rng, "begin", padded)]
    for _ in range(int(rng.integers(3, OPERATIONS))):
        operations.append(_operation(rng, str(rng.choice([*kinds], p=weights / weights.sum())), padded))
    return Chosen(family, _options(rng, family, formats), operations)


def _options(rng: np.random.Generator, family: str, formats: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if rng.random() < 0.25:
        found["model"] = str(rng.choice(NARROW))
        formats = tuple(name for name in formats if name not in NARROW)
    more = FAMILIES[family].encoder or FAMILIES[family].beside  # than the keys and values of the text
    if more:  # such formats are refused then
        formats = tuple(name for name in formats if not _ages(name))
    memory = rng.random()
    if memory < 0.35:
        found["max_cache_len"] = int(rng.choice([24, 40, 64, 150, 300]))
    elif memory < 0.65 and FULL in FAMILIES[family].layers and family != "t5":  # its position bias excludes a window
        found["window"], found["sinks"] = WINDOWS[rng.integers(len(WINDOWS))]
    if "window" in found:
        formats = tuple(name for name in formats if not _ages(name))
    if formats and rng.random() < 0.5:
        found["dtype"] = str(rng.choice(formats))
        plain = [name for name in formats if not _ages(name) and not name.endswith("hadamard")]
        if rng.random() < 0.3 and not _ages(found["dtype"]):
            found["v_dtype"] = str(rng.choice(plain))
            if len({_scales(found["dtype"]), _scales(found["v_dtype"])} - {""}) > 1:
                del found["v_dtype"]
        if found["dtype"].startswith("kvarn"):
            found["sinks"] = int(rng.choice([0, 4]))
        stored = found["dtype"], found.get("v_dtype", found["dtype"])
        if rng.random() < 0.3 and (stored == ("nvfp4", "nvfp4") or all(name.startswith("float8") for name in stored)):
            found["k_scale"], found["v_scale"] = (float(rng.choice(FIXED_SCALES)) for _ in "kv")
    if FAMILIES[family].states and life.RECORDS and rng.random() < 0.6:
        found["record_states"] = int(rng.choice([1, 3, 8, 40]))
    full = set(FAMILIES[family].layers) == {FULL} and not more
    if full and not {"window", "dtype"} & found.keys() and rng.random() < 0.2:
        found["place"] = "host"
    return found


def _ages(name: str) -> bool:
    """Whether only older tokens become codes of this format."""
    return name.startswith(("tokens", "older", "kvarn"))


def _scales(name: str) -> str:
    """What kind of scales a format has, of which keys and values need the same."""
    if name.startswith("mx") or name == "nvfp4":
        return name[:2]
    return "" if "float" in name else "float16"


def _count(rng: np.random.Generator) -> int:
    """How many tokens: mostly few."""
    kind = rng.random()
    return int(rng.integers(1, 10) if kind < 0.75 else rng.integers(6, 30) if kind < 0.93 else rng.integers(60, 160))


def _operation(rng: np.random.Generator, kind: str, padded: bool) -> tuple[Any, ...]:
    seed = int(rng.integers(1000))
    if kind == "begin":
        batch = int(rng.integers(1, 4))
        padding = [int(n) for n in rng.integers(0, 10, batch)] if padded and rng.random() < 0.5 else [0] * batch
        return kind, _count(rng) + max(padding), padding, seed
    if kind == "tokens":
        return kind, _count(rng), seed
    if kind == "steps":
        return kind, int(rng.integers(1, 9)), seed
    if kind == "compiled":
        return kind, int(rng.integers(1, 9)), bool(rng.random() < 0.4), seed
    if kind == "crop":
        return kind, int(rng.integers(1, 6) if rng.random() < 0.75 else rng.integers(1, 80))
    if kind == "attention":
        return kind, str(rng.choice(life.ATTENTIONS))
    if kind == "interrupt":
        return kind, int(rng.integers(2)), bool(rng.random() < 0.5), _count(rng) if rng.random() < 0.4 else 1, seed
    if kind == "beyond":
        return kind, int(rng.integers(1, 5)), seed
    if kind == "empty":
        return kind, _count(rng), seed
    if kind in ("repeat", "fork"):
        return kind, int(rng.integers(2, 4))
    if kind in ("reorder", "select"):
        return kind, seed
    return (kind,)


def shortest(chosen: Chosen, fails: Callable[[Chosen], bool], seconds: float = 60) -> Chosen:
    """A life that fails too, from which nothing can be left out; as far as that is known after so many seconds."""
    end = time.perf_counter() + seconds
    changed = True
    while changed:
        changed = False
        for other in _shorter(chosen):
            if time.perf_counter() > end:
                return chosen
            if fails(other):
                chosen, changed = other, True
                break
    return chosen


def _shorter(chosen: Chosen) -> Any:
    """Lives with a little less, the greatest steps first."""
    operations = chosen.operations
    size = len(operations) // 2
    while size:
        for first in range(0, len(operations), size):
            yield chosen._replace(operations=operations[:first] + operations[first + size :])
        size //= 2
    with_window, with_dtype = {"sinks"}, {"v_dtype", *SCALES}  # what goes with each of these two
    if "window" not in chosen.options:
        with_dtype |= with_window
    for name in chosen.options:
        if name != "sinks":
            dropped = with_window if name == "window" else with_dtype if name == "dtype" else set()
            options = {k: v for k, v in chosen.options.items() if k != name and k not in dropped}
            yield chosen._replace(options=options)
    for i, operation in enumerate(operations):
        for j, value in enumerate(operation[1:], 1):
            for less in _less(value):
                smaller = (*operation[:j], less, *operation[j + 1 :])
                yield chosen._replace(operations=[*operations[:i], smaller, *operations[i + 1 :]])


def _less(value: Any) -> Any:
    if isinstance(value, bool):
        return [False] if value else []
    if isinstance(value, int):
        return sorted({n for n in (1, value // 2, value - 1) if 1 <= n < value})  # no step has 0 tokens
    if isinstance(value, list):
        return [value[:-1]] * (len(value) > 1) + [[0] * len(value)] * any(value)
    return []
