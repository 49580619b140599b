"""What `tikv bench --attention` measured here: the number of queries from which torch's attention is faster.

Calls of different kinds have different speeds, since torch has a kernel of its own for each.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import sys
from typing import Any, NamedTuple

from tikv import runtime
from tikv.errors import TikvError

VARIABLE = "TIKV_ATTENTION_TABLE"  # names a file other than the default; "off" uses none
OFF = "off"
FORM = 2  # the version of the file's form
SQUARE = "causal square"  # as many queries as keys: the first prompt of a sequence
RECTANGULAR = "causal rectangular"  # fewer queries than keys: tokens after earlier ones
FULL = "not causal"  # every query sees every key, as a single query does
KINDS = SQUARE, RECTANGULAR, FULL


class Timing(NamedTuple):
    """Microseconds of both implementations for one shape: a kind of call, queries per sequence, and keys."""

    kind: str
    dtype: str
    head_dim: int
    queries: int
    keys: int
    tikv_us: float
    torch_us: float


class Timings(NamedTuple):
    """What ``tikv bench --attention`` measured on one device, by which ``impl="auto"`` chooses.

    Attributes:
        day: the date of the measurement, such as 2026-11-25.
        torch: the version of torch.
        rows: one timing for each shape.
    """

    day: str
    torch: str
    rows: tuple[Timing, ...]

    def as_dict(self) -> dict[str, Any]:
        """These timings as a dict for JSON."""
        return {**self._asdict(), "rows": [row._asdict() for row in self.rows]}

    def knows(self, kind: str, dtype: str) -> bool:
        """Whether calls of a kind and dtype were timed."""
        return any((row.kind, row.dtype) == (kind, dtype) for row in self.rows)

    def least_queries(self, kind: str, dtype: str, head_dim: int) -> int | None:
        """The least number of queries for which torch is faster, for the nearest timed width; None if it never is."""
        timed = [row for row in self.rows if (row.kind, row.dtype) == (kind, dtype)]
        width = min({row.head_dim for row in timed}, key=lambda width: (abs(width - head_dim), width))
        least = None
        for row in sorted((row for row in timed if row.head_dim == width), key=lambda row: -row.queries):
            if row.torch_us >= row.tikv_us:
                break
            least = row.queries
        return least

    def choices(self) -> str:
        """What "auto" takes for each kind of call, as text for people."""
        return "; ".join(f"{kind}: {self._choice(kind)}" for kind in dict.fromkeys(row.kind for row in self.rows))

    def _choice(self, kind: str) -> str:
        forms = dict.fromkeys((row.dtype, row.head_dim) for row in self.rows if row.kind == kind)
        least = {form: self.least_queries(kind, *form) for form in forms}
        by_torch = [
            f"{dtype} of head_dim {head_dim} from {queries:,} {'query' if queries == 1 else 'queries'}"
            for (dtype, head_dim), queries in least.items()
            if queries is not None
        ]
        if not by_torch:
            return "tikv"
        return f"torch for {', '.join(by_torch)}, otherwise tikv"


def path() -> pathlib.Path:
    """The file's path: the one that TIKV_ATTENTION_TABLE names, or one in the user's cache folder."""
    if named := os.environ.get(VARIABLE):
        return pathlib.Path(named)
    if sys.platform == "darwin":
        folder = pathlib.Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        folder = pathlib.Path(os.environ.get("LOCALAPPDATA") or pathlib.Path.home())
    else:
        folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return folder / "tikv" / "attention.json"


@functools.cache
def device_of(arch: str) -> str:
    """The file's name for the device of a back end."""
    cores = f", {os.cpu_count()} cores" if arch == "cpu" else ""
    return f"{arch}: {runtime.device_name(arch)}{cores}"


def timings(live: runtime.Runtime) -> Timings | None:
    """The timings of the live runtime's device with the installed version of torch; or None."""
    return _timings_and_why(path(), device_of(live.arch))[0]


def why(live: runtime.Runtime) -> str:
    """Where the timings come from, or why nothing was measured, as text for people."""
    return _timings_and_why(path(), device_of(live.arch))[1]


@functools.cache
def _timings_and_why(file: pathlib.Path, device: str) -> tuple[Timings | None, str]:
    default = "tikv's own defaults: "
    if str(file) == OFF:
        return None, f"{default}{VARIABLE}={OFF}"
    try:
        times = _read(file).get(device)
    except FileNotFoundError:
        return None, f"{default}nothing was measured here; run `tikv bench --attention` to measure"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{default}{str(file)!r} cannot be read ({error!r}); `tikv bench --attention` replaces it"
        runtime.log.warning("impl='auto' chooses attention by %s", why)
        return None, why
    if times is None:
        return None, f"{default}nothing was measured on this device; run `tikv bench --attention` to measure"
    if times.torch != (installed := runtime.version_of("torch")):
        now = "no torch" if installed is None else f"torch {installed}"
        why = f"{str(file)!r} was measured with torch {times.torch}, and {now} is installed"
        return None, f"{default}{why}; run `tikv bench --attention` to measure again"
    return times, f"measured on {times.day}, in {str(file)!r}"


def _read(file: pathlib.Path) -> dict[str, Timings]:
    table: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if table["form"] != FORM:
        raise ValueError(f"it has form {table['form']}, and this version of tikv reads form {FORM}")
    return {
        device: Timings(record["day"], record["torch"], tuple(Timing(**row) for row in record["rows"]))
        for device, record in table["devices"].items()
    }


def write(live: runtime.Runtime, times: Timings) -> pathlib.Path:
    """Write the timings of the live runtime's device into the file; those of other devices stay.

    Raises:
        TikvError: the file cannot be written, or the environment asks for none.
    """
    file = path()
    if str(file) == OFF:
        raise TikvError(
            f"bench: {VARIABLE}={OFF} turns the table of attention's times off. Unset it, or set it to the name of "
            "a file."
        )
    try:
        devices = _read(file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        devices = {}  # there is no file, or it cannot be read, which `report` has said
    devices[device_of(live.arch)] = times
    records = {name: timed.as_dict() for name, timed in devices.items()}
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps({"form": FORM, "devices": records}, indent=1) + "\n", encoding="utf-8")
        beside.replace(file)
    except OSError as error:
        raise TikvError(
            f"bench: {str(file)!r} cannot be written ({error}). Set {VARIABLE} to the name of another file."
        ) from None
    _timings_and_why.cache_clear()
    return file
