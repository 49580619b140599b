"""Which kernels attend to which form of call: a recorded table of thousands of forms, on machines that are not here.

A row of the table is a form (machine, dtypes, widths, lengths, pages, masks ...), the names of the kernels that are
launched for it, and a digest of everything that `choice` says: their compile-time choices, iterations, the entries of
their vectors, and the scratch memory. After a change that is meant to choose otherwise, `python
tests/ops/test_kernel_choice.py record` records the same forms again; with `--forms N` it makes N new ones first. `text`
prints all choices, to be compared with those of another version.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import gzip
import hashlib
import itertools
import json
import pathlib
import random
import threading
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tikv import dtypes, engines, launch
from tikv.arrays import ArrayView
from tikv.errors import TikvError
from tikv.formats import GroupFormat, parse_format
from tikv.ops.attention import by_channel
from tikv.ops.attention.call import AttentionCall, Caches, attention_call
from tikv.ops.attention.contiguous import ContiguousLayout, contiguous_cache
from tikv.ops.attention.options import AttentionOptions
from tikv.ops.attention.paged import PagedLayout
from tikv.ops.attention.plan import AttendedTokens, AttentionPlan, Results
from tikv.ops.attention.request import AttendRequest, AttentionScale
from tikv.ops.layouts import Rows
from tikv.runtime.cache import BoundedCache

pytestmark = pytest.mark.thorough

TABLE = pathlib.Path(__file__).parent / "kernel_choice.tsv.gz"
OPERATION = "test"

# name: (arch, threads of a CPU, compute capability, launcher, why there are no subgroups)
MACHINES: dict[str, tuple[str, int, int, str, str]] = {
    "cpu": ("cpu", 8, 0, "direct", "none"),
    "cpu of 1 thread": ("cpu", 1, 0, "direct", "none"),
    "vulkan": ("vulkan", 1, 0, "direct", ""),
    "metal without subgroups": ("metal", 1, 0, "direct", "none"),
    "cuda 7": ("cuda", 1, 7, "native", "none"),
    "cuda 8": ("cuda", 1, 8, "native", "none"),
    "cuda 9": ("cuda", 1, 9, "native", "none"),
    "cuda 9 without the native launcher": ("cuda", 1, 9, "direct", "none"),
}


class Machine(types.SimpleNamespace):
    """What attention asks a runtime, for a machine that is not here."""

    def __init__(self, name: str, invariant: bool) -> None:
        arch, threads, self.capability, self.launcher, why_no_subgroups = MACHINES[name]
        spirv = arch not in ("cpu", "cuda")
        super().__init__(
            arch=arch,
            device="cuda:0" if arch == "cuda" else arch,
            kernel_style="spirv" if spirv else arch,
            is_cpu=arch == "cpu",
            is_cuda=arch == "cuda",
            is_spirv=spirv,
            index=0,
            threads=threads,
            engine=engines.TAICHI,
            invariant=invariant,
            attention_bits=16,
            why_no_subgroups=why_no_subgroups,
            has_float64=not spirv,
            debug=False,
            plans=BoundedCache(),
            side_streams=set(),
            lock=threading.RLock(),
        )
        self.addresses = itertools.count(1)

    def integers(self, dtype: str, *shape: int, value: int = 0, known: Any = None) -> Any:
        """An array of integers; a CPU knows them, another machine if they are given as `known`."""
        if known is None and self.is_cpu:
            known = np.full(shape, value)
        return self.array(dtype, *shape, owner=types.SimpleNamespace(on_host=known))

    def array(self, dtype: str, *shape: int, align: int = 64, strides: tuple[int, ...] = (), owner: Any = None) -> Any:
        """An array of this form; `align` is what its address is a multiple of."""
        if not strides:
            strides = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
        jump = align if align < 64 else 0
        kind = dtypes.parse(dtype, OPERATION) if isinstance(dtype, str) else dtype
        first = 0 if self.is_spirv else next(self.addresses) * 2**40 + jump
        handle, offset = (object(), jump) if self.is_spirv else (None, 0)
        return ArrayView(first, shape, strides, kind, self.device, handle=handle, offset=offset, owner=owner)


class Scratch:
    """Memory that remembers nothing but where it begins."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def array(self, shape: tuple[int, ...], dtype: Any, offset: int = 0) -> ArrayView:
        view: ArrayView = self.machine.array(dtype, *shape)
        view.ptr, view.offset = (0, offset) if self.machine.is_spirv else (2**50 + offset, 0)
        return view


class Recorder:
    """Stands in for `launch.kernel`: the launches, as text."""

    def __init__(self) -> None:
        self.launches: list[str] = []

    def kernel(self, live: Any, factory: Callable[..., Any], *choices: Any) -> Any:
        def bind(iterations: int, *arguments: Any) -> Any:
            vectors = [shown(a) for a in arguments if isinstance(a, tuple)]
            name = factory.__name__.removeprefix("make_")
            self.launches.append(f"{name}({', '.join(map(shown, choices))}) {iterations}: {'; '.join(vectors)}")
            return types.SimpleNamespace(places={}, launcher=lambda: len, release=len)

        return types.SimpleNamespace(bind=bind)


def shown(value: Any) -> str:
    """A value as text; of a NamedTuple, the fields that differ from their defaults."""
    if not hasattr(value, "_fields"):
        return str(value)
    defaults = type(value)._field_defaults if hasattr(type(value), "_field_defaults") else {}
    fields = zip(value._fields, value, strict=True)
    return " ".join(f"{name}={shown(n)}" for name, n in fields if name not in defaults or defaults[name] != n)


@contextlib.contextmanager
def on(machine: Machine, recorder: Recorder, needed: list[int]) -> Iterator[None]:
    """Attention runs on this machine, and its launches are recorded; `needed` gets the bytes of scratch memory."""

    def scratch_of(live: Any, nbytes: int) -> Scratch:
        needed[:] = [nbytes]
        return scratch

    scratch = Scratch(machine)
    multiprocessors = {7: 80, 8: 108, 9: 132}.get(machine.capability, 0)
    new = lambda like, shape, dtype, live, **options: machine.array(dtype, *shape)  # noqa: E731
    attention = "tikv.ops.attention"
    with contextlib.ExitStack() as patches:
        for name, value in {
            "tikv.launch.kernel": recorder.kernel,
            "tikv.launch.launcher.launcher_of": lambda live: (machine.launcher, "it was asked for"),
            "tikv.launch.cuda.driver.generation": lambda index: machine.capability,
            "tikv.launch.cuda.driver.multiprocessors": lambda index: multiprocessors,
            f"{attention}.call.runtime_of": lambda *arrays: machine,
            f"{attention}.launches.scratch_of": scratch_of,
            f"{attention}.plan.new_like": new,
            f"{attention}.mass.new_like": new,
            f"{attention}.measured.timings": lambda live: None,
            f"{attention}.by_channel.new_array": lambda shape, dtype, live: machine.array(dtype, *shape),
        }.items():
            patches.enter_context(mock.patch(name, value))
        yield


# --- a form, as it is in the table


def make_form(random: random.Random) -> dict[str, Any]:
    """A form of call, of the most usual choices and of rare ones."""
    pick, one_in = random.choice, lambda n: random.randrange(n) == 0
    form: dict[str, Any] = {"machine": pick([*MACHINES, "cuda 8", "cuda 9", "cuda 9", "cuda 9"])}
    form["invariant"] = one_in(4)
    form["kind"] = pick(["contiguous"] * 4 + ["ring"] * 2 + ["paged"] * 4 + ["latents"] * 2 + ["channels"] * 2)
    stored = ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8"]
    coded = ["quant4_64", "quant8_64", "quant4_32", "quant3_64", "quant2_64", "q8_0", "q4_0", "mxfp8", "mxfp4", "nvfp4",
             "quant4_64_hadamard7"]  # fmt: skip
    same = not one_in(8)
    if form["kind"] == "latents":
        form["k"] = pick(stored + ["float16", "bfloat16"] * 4)
    elif form["kind"] == "channels":
        form["k"] = pick(["quant4_64", "quant4_64", "quant2_64", "quant4_32", "quant8_128", "quant3_64"])
        same = one_in(2)
    else:
        form["k"] = pick(stored + ["float16", "bfloat16"] * 4 + coded)
    form["q"] = form["k"] if form["k"] in stored[:3] and not one_in(8) else pick([*stored[:3], "float16", "bfloat16"])
    wide = [64, 64, 128, 128, 128, 256]
    form["width"] = pick(wide if form["k"] in coded else [*wide, 96, 80, 160, 40, 288])
    form["width_v"] = pick([64, 128, 256]) if one_in(8) else form["width"]
    if form["k"].endswith("_32") or form["k"] in coded[5:10]:
        form["width"] = form["width_v"] = pick([*wide, 96, 160])
    form["heads"], form["group"] = pick([1, 2, 8, 8]), pick([1, 2, 3, 4, 4, 6, 8, 16])
    form["queries"] = pick([1, 1, 1, 2, 3, 8, 64, 512, 2048])
    form["batch"] = pick([1, 1, 2, 8, 64])
    form["length"] = max(form["queries"], pick([0, 1, 70, 300, 1024, 4000, 8192, 32768]))
    form["lens"] = pick(["host", "device", "device", "known", "by head"])
    form["bits"] = pick(["int32", "int64"])
    form["lse"] = one_in(3)
    plain = one_in(2)
    if not plain and one_in(3):
        form["align"] = pick([2, 4, 8, 16, 32])
    for name, chance, values in (
        ("softcap", 8, [30.0]), ("scale", 16, [-1.0, 0.5]), ("span", 6, [7, 128, 4096]), ("base2", 8, [True]),
        ("full", 8, [True]), ("splits", 12, [1, 3]), ("parents", 10, [True]), ("sink_logits", 8, [True]),
        ("alibi_slopes", 8, [True]), ("indices", 8, ["shared", "by head"]), ("mass", 10, [True]),
        ("align_q", 12, [4, 8]), ("align_scale", 12, [2, 4]), ("gaps", 10, [True]), ("short", 16, [True]),
        ("newer", 16, [2]), ("sharded", 24, [(16, 48)]), ("scale_dtype", 6, ["float32"]), ("one_scale", 3, [True]),
    ):  # fmt: skip
        if not plain and one_in(chance):
            form[name] = pick(values)
    if form["kind"] == "ring":
        form["sinks"], form["ring"] = pick([0, 0, 4]), pick([64, 1000, 4096])
    elif "span" in form and one_in(2) and form["kind"] != "paged":
        form["sinks"] = 4
    if form["kind"] == "paged":
        form["layout"] = pick(["NHD", "NHD"] + ["HND", "VLLM"] * (form["k"] in stored))
        form["page"] = pick([1, 16, 16, 64, 7])
        form["pages_by_head"] = one_in(6)
    if form["kind"] == "latents":
        form["width"], form["width_v"] = pick([(576, 512), (576, 512), (320, 256), (128, 64)])
        form["heads"], form["group"] = pick([1, 1, 2]), pick([4, 16, 128])
        form["paged"] = one_in(2)
    if form["queries"] > 64:
        form["batch"] = pick([1, 2])
    if one_in(4) or form["kind"] in ("latents", "channels"):  # what the kernels of few GPUs serve
        form["machine"], form["invariant"] = pick(["cuda 8", "cuda 9", "cuda 9"]), one_in(8)
        form["q"] = pick(["float16", "bfloat16"]) if form["k"] not in stored[:3] else form["k"]
        if form["kind"] == "channels" and one_in(2):
            form["width"] = form["width_v"] = pick([64, 128])
            form = {name: value for name, value in form.items() if name not in ("softcap", "span", "scale_dtype")}
        if form["kind"] != "latents":
            form["queries"] = pick([1, 64, 512])
            form["length"] = max(form["queries"], form["length"])
        for name in ("align", "align_q", "gaps"):
            form.pop(name, None)
    same = same or form["kind"] == "latents" or form.get("layout") == "VLLM"
    form["v"] = form["k"].removesuffix("_hadamard7") if same else pick(stored + coded[:-1])
    return form


def words_of(machine: Machine, form: dict[str, Any], name: str, lead: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """The array of K or V with these axes before the columns, that of its scales or None, and its format or None."""
    storage, width = form[name], form["width" if name == "k" else "width_v"]
    kind = parse_format(storage)
    columns = kind.words(width) if isinstance(kind, GroupFormat) else width
    each = columns * (1 + ("gaps" in form))
    steps = tuple(int(np.prod(lead[axis + 1 :])) * each for axis in range(len(lead)))
    dtype = "uint32" if isinstance(kind, GroupFormat) else storage
    array = machine.array(dtype, *lead, columns, align=form.get("align", 64), strides=(*steps, 1))
    align = form.get("align_scale", 64)
    if isinstance(kind, GroupFormat):
        fixed = kind.own_scale_dtype
        scales = fixed.name if fixed else form.get("scale_dtype", "float16")
        return array, machine.array(scales, *lead, kind.numbers_of(width), align=align), kind
    scales = form.get("scale_dtype", "float16")
    if storage == "int8":
        return array, machine.array(scales, *lead, align=align), None
    if storage.startswith("float8") and "one_scale" in form:
        return array, machine.array("float32", form["heads"]), None
    return array, None, None


def call_of(machine: Machine, form: dict[str, Any]) -> tuple[AttentionCall, Any]:
    """A checked call of a form, and its queries."""
    batch, heads, queries, length = form["batch"], form["heads"], form["queries"], form["length"]
    all_heads = heads * form["group"]
    shape = (batch, all_heads, queries, form["width"]) if queries > 1 else (batch, all_heads, form["width"])
    q = machine.array(form["q"], *shape, align=form.get("align_q", 64))
    capacity = form.get("ring", 0) + form.get("sinks", 0) if form["kind"] == "ring" else max(1, length + 100)
    lens: Any = length
    if form["lens"] != "host":
        axes = (batch, heads) if form["lens"] == "by head" else (batch,)
        known = np.full(axes, length)
        known.flat[0] = queries
        on_host = known if machine.is_cpu or form["lens"] != "device" else None
        lens = machine.integers(form["bits"], *axes, known=on_host)
    paged = form["kind"] == "paged" or form.get("paged", False)
    terms = {}
    if "sink_logits" in form:
        terms["sink_logits"] = machine.array("float32", all_heads)
    if "alibi_slopes" in form:
        terms["alibi_slopes"] = machine.array("float32", all_heads)
    if "parents" in form:
        terms["parents"] = machine.integers(form["bits"], batch, queries, value=-1)
    if "indices" in form:
        lead = (batch, heads) if form["indices"] == "by head" else (batch,)
        terms["indices"] = machine.integers(form["bits"], *lead, queries, min(max(1, length), 300))
    window = form.get("span")
    if form["kind"] == "ring":
        window = capacity
    request = AttendRequest(
        scale=form.get("scale"), softcap=form.get("softcap"), window=window, causal="full" not in form,
        num_splits=form.get("splits"), lse_base2="base2" in form, newer=form.get("newer", 0), short="short" in form,
        **terms,
    )  # fmt: skip
    layout = form.get("layout", "NHD")
    if paged:
        page = form.get("page", 64)
        blocks, by_head = max(1, batch * -(-capacity // page)), form.get("pages_by_head", False)
        of_pool = 1 if by_head else heads
        lead = {"NHD": (blocks, page, of_pool), "HND": (blocks, of_pool, page)}
        sizes = lead.get(layout)
        (k, k_scale, k_format), (v, v_scale, v_format) = (
            words_of(machine, form, name, sizes or (blocks, page, of_pool)) for name in "kv"
        )
        if sizes is None:
            k, v = (vllm_pool(machine, form, name, blocks, page, of_pool) for name in "kv")
        tables = (batch, heads, -(-capacity // page)) if by_head else (batch, -(-capacity // page))
        table = machine.integers(form["bits"], *tables)
    else:
        lead = (batch, heads, capacity)
        (k, k_scale, k_format), (v, v_scale, v_format) = (words_of(machine, form, name, lead) for name in "kv")
    formats = (k_format, v_format) if k_format or v_format or form["k"] != form["v"] else None
    inner = form["width_v"] if form["kind"] == "latents" else None
    if inner is not None:
        v, v_scale, formats = None, None, None
    if paged:
        pools = Caches(PagedLayout(layout), k, v, lens, table, k_scale, v_scale, inner, formats)
        return attention_call(OPERATION, q, pools, request), q
    slots = ContiguousLayout(form["kind"] == "ring", form.get("sinks", 0))
    caches = Caches(slots, k, v, lens, None, k_scale, v_scale, inner, formats)
    call = attention_call(OPERATION, q, caches, request, "sum" if form.get("mass") else "")
    if "sharded" in form:
        cache = contiguous_cache(call.arrays, sinks=0, ring=0, formats=formats or (None, None))
        options = AttentionOptions(form.get("scale"), sharded=tuple(form["sharded"]))
        plan = AttentionPlan(machine, OPERATION, call.arrays, cache, options)  # type: ignore[arg-type]
        return call._replace(plan=plan), q
    return call, q


def vllm_pool(machine: Machine, form: dict[str, Any], name: str, blocks: int, page: int, heads: int) -> ArrayView:
    """A pool of K or V in vLLM's layout."""
    width, chunk = form["width" if name == "k" else "width_v"], 16 // dtypes.parse(form[name], OPERATION).itemsize
    if name == "v":
        return machine.array(form[name], blocks, heads, width, page)  # type: ignore[no-any-return]
    return machine.array(form[name], blocks, heads, width // chunk, page, chunk)  # type: ignore[no-any-return]


def over_channels(machine: Machine, form: dict[str, Any]) -> str:
    """Record attention over keys that are codes by channel; returns what the plan says."""
    batch, heads, length, width = form["batch"], form["heads"], form["length"], form["width"]
    codes = parse_format(form["k"])
    if not isinstance(codes, GroupFormat) or codes.numbers != 2:
        return "no such keys"
    q = machine.array(form["q"], batch, heads * form["group"], form["queries"], width)
    groups = max(1, length // codes.group)
    k = machine.array("uint32", batch, heads, groups, width, codes.group * codes.bits // 32)
    numbers = machine.array("float16", batch, heads, groups, width, 2, align=form.get("align_scale", 64))
    v, v_scale, v_format = words_of(machine, form, "v", (batch, heads, groups * codes.group))
    rows = contiguous_cache({"k": v, "v": v} | ({} if v_scale is None else {"v_scale": v_scale}),
                            formats=(v_format, v_format)).v  # fmt: skip
    assert isinstance(rows, Rows)
    values = by_channel.ScoredValues(rows, form["width_v"], groups * codes.group, span=form.get("span"))
    keys = by_channel.ChannelKeys(k, numbers, codes)
    asked = AttentionScale(form.get("scale"), form.get("softcap"))
    arrays = {"q": q, "k": k, "v": v} | ({} if v_scale is None else {"v_scale": v_scale})
    plan = by_channel.channel_plan(machine, OPERATION, {**arrays, "k_scale": numbers}, keys, values, asked)  # type: ignore[arg-type]
    if plan is not None:
        arrays["k_scale"] = numbers
    else:
        arrays["k"] = machine.array("float32", batch, heads, form["group"] * form["queries"], groups * codes.group)
        plan = by_channel.scored_plan(machine, OPERATION, arrays, values, asked)  # type: ignore[arg-type]
    call = AttentionCall(plan, arrays, groups * codes.group, ())
    return attended(machine, {**form, "lse": True}, call, q)


def attended(machine: Machine, form: dict[str, Any], call: AttentionCall, q: ArrayView) -> str:
    """Bind the launches of a call; returns what its plan says about it."""
    plan, shape = call.plan, (*q.shape[:-1], form["width_v"])
    out = machine.array(q.dtype, *shape, align=form.get("align_out", 64))
    lse = machine.array("float32", *q.shape[:-1]) if form["lse"] else None
    results = Results(out, form["lse"], lse, is_new=True)
    ready = plan.ready(None, dict(call.arrays), AttendedTokens(call.length), results)
    ready.prepared()
    if form["kind"] == "contiguous" and form["lse"] and "mass" not in form and "indices" not in form:
        with contextlib.suppress(TikvError):
            call.prepare_to_weigh(lse, machine.array("float32", *q.shape[:1], form["heads"], form["length"] + 1), "sum")
    return f"{plan.family.most_queries} queries; torch: {', '.join(sorted(plan.by_torch.faster))}"


def choice(form: dict[str, Any]) -> str:
    """What is launched for a form, as text; the error if it is refused."""
    machine, recorder, needed = Machine(form["machine"], form["invariant"]), Recorder(), [0]
    with on(machine, recorder, needed):
        try:
            if form["kind"] == "channels":
                said = over_channels(machine, form)
            else:
                said = attended(machine, form, *call_of(machine, form))
        except TikvError as error:
            return f"{type(error).__name__}: {error}"
    return "\n".join([*recorder.launches, f"{needed[0]} bytes; {said}"])


def row_of(form: dict[str, Any], said: str) -> str:
    """What the table has of a form: the machine, the rest of the form, the kernels, the digest."""
    machine, rest = form["machine"], {name: value for name, value in form.items() if name != "machine"}
    names = [line.partition("(")[0] for line in said.split("\n")[:-1]]
    digest = hashlib.sha256(said.encode()).hexdigest()[:12]
    return "\t".join([machine, json.dumps(rest, separators=(",", ":")), " ".join(dict.fromkeys(names)), digest])


def form_of(row: str) -> dict[str, Any]:
    """The form of a row of the table."""
    machine, rest = row.split("\t")[:2]
    return {"machine": machine, **json.loads(rest)}


# --- the test


@functools.cache
def table() -> list[str]:
    """The rows that are recorded."""
    return gzip.decompress(TABLE.read_bytes()).decode().splitlines()


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("machine", MACHINES)
def test_each_form_gets_the_kernels_that_are_recorded(arch, machine):
    rows = [row for row in table() if row.startswith(f"{machine}\t")]
    assert len(rows) > 100
    for row in rows:
        said = choice(form := form_of(row))
        assert row_of(form, said) == row, f"now:\n{said}"


@pytest.mark.archs("cpu")
def test_the_table_has_each_kernel_of_attention(arch):
    assert {name for row in table() for name in row.split("\t")[2].split(" ")} == {
        "attend_cpu", "attend_block", "attend_block_in_order", "attend_lanes", "attend_tensor", "attend_hopper",
        "attend_tensor_in_order", "attend_channels", "attend_latents", "mass", "mass_cpu", "mass_lanes", "mass_tensor",
        "merge", "merge_in_order", "tree", "turn_rows", "attend_hopper_in_order", "merge_in_passing",
    }  # fmt: skip


@pytest.mark.archs("cpu")
def test_without_the_native_launcher_a_plan_takes_other_kernels(arch):
    """Where it needs it: the kernels that a plan gets which is made after another launcher was chosen."""
    changed = 0
    for row in table():
        form = form_of(row)
        if form["machine"] != "cuda 9" or form["kind"] == "channels" or form["invariant"]:
            continue
        machine, recorder = Machine("cuda 9", False), Recorder()
        with on(machine, recorder, [0]):
            call, q = call_of(machine, form)
            if call.plan.needs_native:
                machine.launcher = "direct"
                attended(machine, form, call, q)
                changed += 1
                expected = choice({**form, "machine": "cuda 9 without the native launcher"}).split("\n")[:-1]
                assert recorder.launches == expected, form
    assert changed > 100


class Made(Recorder):
    """A `Recorder` for an engine that cannot compile some kernels: of these, files have those with some names."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self.names = names

    def kernel(self, live: Any, factory: Callable[..., Any], *choices: Any) -> Any:
        uses_bitcode = getattr(factory, "uses_bitcode", False)
        assert uses_bitcode == (".sm80." in factory.__module__ or ".sm90." in factory.__module__), factory
        if uses_bitcode and factory.__name__.removeprefix("make_") not in self.names:

            def refuse(*_: Any) -> None:
                self.launches.clear()
                raise launch.NeedsNativeLauncher("no file has it")

            return types.SimpleNamespace(bind=refuse)
        return super().kernel(live, factory, *choices)


def on_quadrants(form: dict[str, Any], launcher: str, names: Collection[str]) -> list[str]:
    """What is launched for a form where Quadrants compiles, and files have tensor cores' kernels with these names."""
    machine, recorder = Machine("cuda 9", False), Made(names)
    machine.engine, machine.launcher = engines.QUADRANTS, launcher
    with on(machine, recorder, [0]):
        call, q = call_of(machine, form)
        attended(machine, form, call, q)
    return recorder.launches


def attending(launches: list[str]) -> list[str]:
    """Without those that weigh keys, for which Quadrants always compiles a kernel of its own."""
    return [line for line in launches if not line.startswith("mass")]


@pytest.mark.archs("cpu")
def test_what_no_file_has_is_attended_by_what_quadrants_compiles(arch):
    """Or by another family that a file has: a file for 8.0 on an H200 has no warpgroups."""
    everything, no_warpgroups = ("attend_hopper", "attend_latents", "attend_tensor"), ("attend_tensor",)
    seen = collections.Counter()
    for row in [row for row in table() if row.startswith("cuda 9\t")][::4]:
        form = form_of(row)
        if form["kind"] == "channels" or form["invariant"] or "Error" in choice(form):
            continue
        taichi, compiled = choice(form).split("\n")[:-1], on_quadrants(form, "direct", ())
        assert attending(on_quadrants(form, "native", everything)) == attending(taichi), form
        assert on_quadrants(form, "native", ()) == compiled, form
        between = on_quadrants(form, "native", no_warpgroups)
        assert not any(line.startswith("mass_tensor(") for line in (*between, *compiled))
        names = {line.partition("(")[0] for line in (*between, *compiled)}
        assert not names & {"attend_hopper", "attend_latents"}
        seen["warpgroups"] += attending(between) != attending(taichi)
        seen["tensor cores"] += between != compiled
    assert min(seen["warpgroups"], seen["tensor cores"]) > 20, seen


@pytest.mark.archs("cpu")
def test_keys_by_channel_are_read_by_what_quadrants_compiles(arch):
    """No other family reads them, so a plan could not leave that of tensor cores."""
    form = next(form for row in table() if (form := form_of(row))["kind"] == "channels" and "attend_channels" in row)
    machine, recorder = Machine("cuda 9", False), Made(())
    machine.engine = engines.QUADRANTS
    with on(machine, recorder, [0]):
        over_channels(machine, form)
    assert [line.partition("(")[0] for line in recorder.launches] == ["attend_block", "merge"]


def main() -> None:
    """Record the forms of the table again, or as many new ones, or print what is chosen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("record", "text"))
    parser.add_argument("--forms", type=int, default=0)
    asked = parser.parse_args()
    numbers = random.Random(1)
    made = [make_form(numbers) for _ in range(asked.forms)]
    rows = {}
    for form in made or map(form_of, table()):
        said = choice(form)
        if asked.what == "text":
            print(json.dumps(form), said, sep="\n", end="\n\n")
        elif not made or not ("Error: " in said or "no such keys" in said):
            rows.setdefault(said if made else len(rows), row_of(form, said))
    if asked.what == "record":
        TABLE.write_bytes(gzip.compress("\n".join(sorted(rows.values())).encode(), mtime=0))
        print(f"{len(rows)} forms, {TABLE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
