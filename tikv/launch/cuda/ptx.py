"""Rewrite the PTX of a Taichi kernel so that its arguments are passed by value with the launch.

Taichi's entry takes one 32-byte struct {argument buffer, runtime, thread, result buffer} and reads arguments from the
buffer, which is in device memory. Another entry, with one thread, first copies the loop's bound from there into the
runtime's memory. Here the buffer's contents become a parameter and that entry disappears. So there is one launch
without a buffer in device memory, and replays of a CUDA graph always find their arguments. On request, arithmetic is
made exact. `peepholes` has the rewrites that only make kernels faster.

Every use of a replaced part is recognised, or the kernel is refused. So PTX from a Taichi that writes it differently is
never misread.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tikv.errors import ArchError
from tikv.launch.cuda import peepholes
from tikv.launch.cuda.ptx_body import inlined
from tikv.launch.cuda.ptx_text import ARGUMENTS, REGISTER, statements


class Unpatchable(ArchError):
    """PTX of a form that this module does not know; the kernel stays with Taichi's launcher."""


class Patched(NamedTuple):
    """PTX whose entry takes the arguments by value: its text, the entry's name and the threads of a block."""

    text: str
    entry: str
    block: int


_ENTRY = re.compile(r"\.visible \.entry (\w+)\(\s*(\.param [^)]*)\)(.*?)\n\}", re.S)
_STRUCT = re.compile(r"^\.param \.align 8 \.b8 (\w+)\[32\]\s*$")
_BLOCK = re.compile(r"\.maxntid (\d+), 1, 1")
_SIZED_BY_LAUNCH = r"^\.extern \.shared \.align \d+ \.b8 \w+\[\];$"
_COVERED = "//!"  # marks instructions that only sm_90a knows: see `kernels.attention.sm90.ir`


def patch(
    ptx: str,
    argument_bytes: int,
    overlap: bool = False,
    strict: bool = False,
    resident: int | None = None,
    pairs: bool = False,
    shared: bool = False,
) -> Patched:
    """Pass `argument_bytes` of arguments by value; with `overlap`, let a launch start while the previous one ends.

    With `strict`, arithmetic follows IEEE: each product and sum is rounded separately, and subnormals are kept.
    `resident` is the number of blocks that a multiprocessor should hold at once; the assembler saves registers for it.
    For `pairs`, see `peepholes`. `shared` says that the launch sets the size of the kernel's shared memory, which is
    not in the text.

    Overlap is the programmatic dependent launch of compute capability 9: every kernel allows the next one to start at
    once, and touches no memory before the previous one is complete. So the order of reads and writes does not change.

    Raises:
        Unpatchable: the text does not have the form that this module knows.
    """
    ptx = inlined(ptx.replace("\0", "").rstrip() + "\n")
    # Taichi declares its shared arrays extern and allocates them at the launch; those with a size are allocated here.
    ptx = re.sub(r"^\.extern (\.shared \.align \d+ \.b8 \w+\[[1-9]\d*\];)", r"\1", ptx, flags=re.M)
    entries = list(_ENTRY.finditer(ptx))
    if not 1 <= len(entries) <= 2:
        raise Unpatchable(f"{len(entries)} entries where one loop has one or two")
    known = re.sub(_SIZED_BY_LAUNCH, "", ptx, flags=re.M) if shared else ptx
    if re.search(r"^\s*\.extern|\.func\b", known, re.M):
        raise Unpatchable("calls into Taichi's runtime, or shared memory without a size")
    bound = _bound_of(entries[0]) if len(entries) == 2 else None
    main = entries[-1]
    name, block = main.group(1), _BLOCK.search(main.group(3))
    if block is None:
        raise Unpatchable("no fixed block")
    body = _by_value(_struct(main), main.group(3), bound, argument_bytes)
    body = peepholes.quarters(peepholes.whole_words(body))
    if pairs:
        body = peepholes.pairs(body)
    if resident is not None:
        body = peepholes.resident_blocks(body, resident)
    if strict:
        body = _strict(body)
    parameter = f"\t.param .align 16 .b8 {ARGUMENTS}[{argument_bytes}]\n"
    head = ptx[: entries[0].start()]
    if overlap:
        head, body = peepholes.early_start(head, body)
    if _COVERED in body:
        head, body = uncovered(head, body)
    text = f"{head}.visible .entry {name}(\n{parameter}){body}\n}}{ptx[main.end() :]}"
    return Patched(text, name, int(block.group(1)))


def uncovered(head: str, body: str) -> tuple[str, str]:
    """Turn the comments that hold instructions of a newer GPU into instructions; return (head, body)."""
    head = re.sub(r"\.target sm_\d+", ".target sm_90a", re.sub(r"\.version \d\.\d", ".version 8.0", head))
    return head, body.replace(_COVERED, "")


_APPROXIMATE = (
    (r"\t(\S+?)\.ftz(\S*) \t", r"\t\1\2 \t"),
    (r"\t(add|sub|mul)\.(f32|f64) \t", r"\t\1.rn.\2 \t"),  # without .rn the assembler may fuse them
    (r"\tdiv\.(?:full|approx)\.f32 \t", "\tdiv.rn.f32 \t"),
    (r"\t(sqrt|rcp)\.approx\.f32 \t", r"\t\1.rn.f32 \t"),
    (
        rf"\trsqrt\.approx\.f32 \t({REGISTER}), ({REGISTER});",
        r"\tsqrt.rn.f32 \t%exact32, \2;\n\trcp.rn.f32 \t\1, %exact32;",
    ),
    (
        rf"\tfma\.rn\.f(32|64) \t({REGISTER}), (\S+), (\S+), (\S+);",
        r"\tmul.rn.f\1 \t%exact\1, \3, \4;\n\tadd.rn.f\1 \t\2, %exact\1, \5;",
    ),
)


def _strict(body: str) -> str:
    """Undo the approximations that Taichi makes only on CUDA, and there always."""
    for approximate, exact in _APPROXIMATE:
        body = re.sub(approximate, exact, body)
    used = [width for width in ("32", "64") if f"%exact{width}" in body]
    declared = "".join(f"\t.reg .f{width} \t%exact{width};\n" for width in used)
    return body.replace("{\n", "{\n" + declared, 1)


def _struct(entry: re.Match[str]) -> str:
    match = _STRUCT.match(entry.group(2))
    if match is None:
        raise Unpatchable(f"parameters {entry.group(2).strip()!r}")
    return match.group(1)


def _bound_of(entry: re.Match[str]) -> tuple[str, str]:
    """(offset in the arguments, offset in the runtime) of the bound that the first entry copies."""
    struct = re.escape(_struct(entry))
    known = re.fullmatch(
        rf"ld\.param\.u64 (?P<a>{REGISTER}), \[{struct}\];"
        rf"cvta\.to\.global\.u64 (?P<b>{REGISTER}), (?P=a);"
        rf"ld\.global\.u32 (?P<n>{REGISTER}), \[(?P=b)(?:\+(?P<argument>\d+))?\];"
        rf"ld\.param\.u64 (?P<c>{REGISTER}), \[{struct}\+8\];"
        rf"cvta\.to\.global\.u64 (?P<d>{REGISTER}), (?P=c);"
        rf"ld\.global\.u64 (?P<e>{REGISTER}), \[(?P=d)\+(?P<runtime>\d+)\];"
        rf"st\.u32 \[(?P=e)\], (?P=n);"
        r"ret;",
        "".join(statements(entry.group(3))),
    )
    if known is None:
        raise Unpatchable("a first entry that does more than copy the loop's bound")
    return known["argument"] or "0", known["runtime"]


def _by_value(struct: str, body: str, bound: tuple[str, str] | None, argument_bytes: int) -> str:
    """Read arguments from the parameter instead of through the struct's pointer."""
    if bound is not None:
        argument, runtime = bound
        body, replaced = re.subn(
            rf"\tld\.param\.u64 \t({REGISTER}), \[{struct}\+8\];\n"
            rf"\tcvta\.to\.global\.u64 \t({REGISTER}), \1;\n"
            rf"\tld\.global\.u64 \t({REGISTER}), \[\2\+{runtime}\];\n"
            rf"\tld\.u32 \t({REGISTER}), \[\3\];\n",
            rf"\tld.param.u32 \t\4, [{struct}+{argument}+0];\n",
            body,
        )
        if replaced != 1:
            raise Unpatchable("a loop bound that is not read where it was put")
        body = body.replace(f"[{struct}+{argument}+0]", f"[{ARGUMENTS}+{argument}]")
    # A `mov` of the struct's address, or of such a copy, gives it another name.
    names = {struct}
    while True:
        alias = next(
            (
                m
                for m in re.finditer(rf"\tmov\.[ub]64 \t({REGISTER}), ([\w%]+);\n", body)
                if m.group(2) in names and m.group(1) not in names
            ),
            None,
        )
        if alias is None:
            break
        names.add(alias.group(1))
        body = body.replace(alias.group(0), "")
    struct_pattern = "|".join(re.escape(name) for name in names)
    pointers = re.findall(rf"\tld\.param\.u64 \t({REGISTER}), \[(?:{struct_pattern})\];\n", body)
    body = re.sub(rf"\tld\.param\.u64 \t{REGISTER}, \[(?:{struct_pattern})\];\n", "", body)
    bases: dict[str, int] = {}  # registers that hold the arguments' address, and their offset in the arguments
    for pointer in pointers:
        bases |= dict.fromkeys(re.findall(rf"\tcvta\.to\.global\.u64 \t({REGISTER}), {pointer};\n", body), 0)
        body = re.sub(rf"\tcvta\.to\.global\.u64 \t{REGISTER}, {pointer};\n", "", body)
    for base in tuple(bases):
        for register, step in re.findall(rf"\tadd\.s64 \t({REGISTER}), {base}, (\d+);\n", body):
            bases[register] = int(step)
        body = re.sub(rf"\tadd\.s64 \t{REGISTER}, {base}, \d+;\n", "", body)

    def copied(match: re.Match[str]) -> str:
        """Remove a copy of the address, which a path through the entry has instead of reading it again."""
        to, base = match.groups()
        return "" if to in bases and bases[to] == bases.get(base) else match.group(0)

    body = re.sub(rf"\tmov\.[ub]64 \t({REGISTER}), ({REGISTER});\n", copied, body)

    def read(match: re.Match[str]) -> str:
        width, base = match["type"], match["base"]
        if base not in bases:
            return match.group(0)
        offset = bases[base] + int(match["offset"] or 0)
        if offset + 4 > argument_bytes:
            raise Unpatchable(f"reads byte {offset} of {argument_bytes} bytes of arguments")
        return f"\tld.param.{width} \t{match['to']}, [{ARGUMENTS}+{offset}];"

    body = re.sub(
        rf"\tld\.global\.(?:nc\.)?(?P<type>(?:v[24]\.)?[a-z]\d+) \t(?P<to>{REGISTER}|\{{[^}}]*\}}), "
        rf"\[(?P<base>{REGISTER})(?:\+(?P<offset>\d+))?\];",
        read,
        body,
    )
    for gone in (names | bases.keys() | set(pointers)) - {struct}:
        if re.search(rf"{gone}(?!\d)", body):
            raise Unpatchable(f"uses the address of its arguments in another way ({gone})")
    if struct in body:
        raise Unpatchable("uses the runtime or the result buffer")
    return body
