"""Rewrite the PTX of a Taichi kernel so that its arguments are passed by value with the launch.

Taichi's entry takes one 32-byte struct {argument buffer, runtime, thread, result buffer} and reads arguments from the
buffer, which is device memory; a first entry, of one thread, copies the loop's bound from there into the runtime's
memory. Here the buffer's contents become a parameter and the first entry disappears: one launch, no device memory of
our own, nothing that a CUDA graph could find changed. Words of 64 bits, which Taichi moves in halves, are moved whole.

Every use of what is replaced is recognised or the kernel is refused: a Taichi that writes otherwise is never misread.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tikv.errors import ArchError


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
_REGISTER = r"%[a-z]+\d+"
_INSTRUCTION = re.compile(r"^\t[a-z@]", re.M)


def patch(
    ptx: str, argument_bytes: int, overlap: bool = False, strict: bool = False, resident: int | None = None
) -> Patched:
    """Pass `argument_bytes` of arguments by value; with `overlap`, let a launch get ready while the last one ends.

    With `strict`, arithmetic is IEEE's: each product and sum is rounded by itself, subnormals stay. `resident` is how
    many blocks a multiprocessor shall hold at once, for which the assembler spares registers.

    Overlap is the programmatic dependent launch of compute capability 9: every kernel allows the next one to start at
    once, and touches no memory before the one ahead of it is complete. The order of reads and writes stays as it was.

    Raises:
        Unpatchable: the text is not of the form this module knows.
    """
    ptx = ptx.replace("\0", "").rstrip() + "\n"
    # Taichi declares its shared arrays extern and gives them room at the launch; having sizes, they get it here.
    ptx = re.sub(r"^\.extern (\.shared \.align \d+ \.b8 \w+\[[1-9]\d*\];)", r"\1", ptx, flags=re.M)
    entries = list(_ENTRY.finditer(ptx))
    if not 1 <= len(entries) <= 2:
        raise Unpatchable(f"{len(entries)} entries where one loop has one or two")
    if re.search(r"^\s*\.extern|\.func\b", ptx, re.M):
        raise Unpatchable("calls into Taichi's runtime, or shared memory without a size")
    bound = _bound_of(entries[0]) if len(entries) == 2 else None
    main = entries[-1]
    name, block = main.group(1), _BLOCK.search(main.group(3))
    if block is None:
        raise Unpatchable("no fixed block")
    body = _quarters(_whole_words(_by_value(_struct(main), main.group(3), bound, argument_bytes)))
    if resident is not None:
        body = re.sub(r"\.minnctapersm \d+", f".minnctapersm {resident}", body)
    if strict:
        body = _strict(body)
    parameter = f"\t.param .align 16 .b8 {ARGUMENTS}[{argument_bytes}]\n"
    head = ptx[: entries[0].start()]
    if overlap:
        head = re.sub(r"\.target sm_\d+", ".target sm_90", re.sub(r"\.version \d\.\d", ".version 7.8", head))
        body = _INSTRUCTION.sub(r"\tgriddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;\n\g<0>", body, count=1)
    text = f"{head}.visible .entry {name}(\n{parameter}){body}\n}}{ptx[main.end() :]}"
    return Patched(text, name, int(block.group(1)))


ARGUMENTS = "arguments"

_APPROXIMATE = (
    (r"\t(\S+?)\.ftz(\S*) \t", r"\t\1\2 \t"),
    (r"\t(add|sub|mul)\.(f32|f64) \t", r"\t\1.rn.\2 \t"),  # without .rn the assembler may fuse them
    (r"\tdiv\.(?:full|approx)\.f32 \t", "\tdiv.rn.f32 \t"),
    (r"\t(sqrt|rcp)\.approx\.f32 \t", r"\t\1.rn.f32 \t"),
    (
        rf"\trsqrt\.approx\.f32 \t({_REGISTER}), ({_REGISTER});",
        r"\tsqrt.rn.f32 \t%exact32, \2;\n\trcp.rn.f32 \t\1, %exact32;",
    ),
    (
        rf"\tfma\.rn\.f(32|64) \t({_REGISTER}), (\S+), (\S+), (\S+);",
        r"\tmul.rn.f\1 \t%exact\1, \3, \4;\n\tadd.rn.f\1 \t\2, %exact\1, \5;",
    ),
)


def _strict(body: str) -> str:
    """Take back what Taichi's CUDA code generator always allows itself, and the other back ends do not."""
    for approximate, exact in _APPROXIMATE:
        body = re.sub(approximate, exact, body)
    used = [width for width in ("32", "64") if f"%exact{width}" in body]
    declared = "".join(f"\t.reg .f{width} \t%exact{width};\n" for width in used)
    return body.replace("{\n", "{\n" + declared, 1)


def _struct(entry: re.Match[str]) -> str:
    found = _STRUCT.match(entry.group(2))
    if found is None:
        raise Unpatchable(f"parameters {entry.group(2).strip()!r}")
    return found.group(1)


def _bound_of(entry: re.Match[str]) -> tuple[str, str]:
    """(offset among the arguments, offset in the runtime) of what the first entry copies."""
    struct = re.escape(_struct(entry))
    statements = _statements(entry.group(3))
    known = re.fullmatch(
        rf"ld\.param\.u64 (?P<a>{_REGISTER}), \[{struct}\];"
        rf"cvta\.to\.global\.u64 (?P<b>{_REGISTER}), (?P=a);"
        rf"ld\.global\.u32 (?P<n>{_REGISTER}), \[(?P=b)(?:\+(?P<argument>\d+))?\];"
        rf"ld\.param\.u64 (?P<c>{_REGISTER}), \[{struct}\+8\];"
        rf"cvta\.to\.global\.u64 (?P<d>{_REGISTER}), (?P=c);"
        rf"ld\.global\.u64 (?P<e>{_REGISTER}), \[(?P=d)\+(?P<runtime>\d+)\];"
        rf"st\.u32 \[(?P=e)\], (?P=n);"
        r"ret;",
        "".join(statements),
    )
    if known is None:
        raise Unpatchable("a first entry that does more than copy the loop's bound")
    return known["argument"] or "0", known["runtime"]


def _statements(body: str) -> list[str]:
    """The instructions of an entry: no comments, declarations, labels; one space between words."""
    lines = (" ".join(line.partition("//")[0].split()) for line in body.splitlines())
    return [line for line in lines if line.endswith(";") and not line.startswith(".")]


def _by_value(struct: str, body: str, bound: tuple[str, str] | None, argument_bytes: int) -> str:
    """Read arguments from the parameter instead of through the struct's pointer."""
    if bound is not None:
        argument, runtime = bound
        body, found = re.subn(
            rf"\tld\.param\.u64 \t({_REGISTER}), \[{struct}\+8\];\n"
            rf"\tcvta\.to\.global\.u64 \t({_REGISTER}), \1;\n"
            rf"\tld\.global\.u64 \t({_REGISTER}), \[\2\+{runtime}\];\n"
            rf"\tld\.u32 \t({_REGISTER}), \[\3\];\n",
            rf"\tld.param.u32 \t\4, [{struct}+{argument}+0];\n",
            body,
        )
        if found != 1:
            raise Unpatchable("a loop bound that is not read where it was put")
        body = body.replace(f"[{struct}+{argument}+0]", f"[{ARGUMENTS}+{argument}]")
    # `mov` of the struct's address, and of that, are other names of it.
    names = {struct}
    while True:
        alias = next(
            (
                m
                for m in re.finditer(rf"\tmov\.[ub]64 \t({_REGISTER}), ([\w%]+);\n", body)
                if m.group(2) in names and m.group(1) not in names
            ),
            None,
        )
        if alias is None:
            break
        names.add(alias.group(1))
        body = body.replace(alias.group(0), "")
    struct_pattern = "|".join(re.escape(name) for name in names)
    pointers = re.findall(rf"\tld\.param\.u64 \t({_REGISTER}), \[(?:{struct_pattern})\];\n", body)
    body = re.sub(rf"\tld\.param\.u64 \t{_REGISTER}, \[(?:{struct_pattern})\];\n", "", body)
    bases: dict[str, int] = {}  # registers that hold the arguments' address, and how far into them
    for pointer in pointers:
        bases |= dict.fromkeys(re.findall(rf"\tcvta\.to\.global\.u64 \t({_REGISTER}), {pointer};\n", body), 0)
        body = re.sub(rf"\tcvta\.to\.global\.u64 \t{_REGISTER}, {pointer};\n", "", body)
    for base in tuple(bases):
        for register, step in re.findall(rf"\tadd\.s64 \t({_REGISTER}), {base}, (\d+);\n", body):
            bases[register] = int(step)
        body = re.sub(rf"\tadd\.s64 \t{_REGISTER}, {base}, \d+;\n", "", body)

    def read(match: re.Match[str]) -> str:
        width, base = match["type"], match["base"]
        if base not in bases:
            return match.group(0)
        offset = bases[base] + int(match["offset"] or 0)
        if offset + 4 > argument_bytes:
            raise Unpatchable(f"reads byte {offset} of {argument_bytes} bytes of arguments")
        return f"\tld.param.{width} \t{match['to']}, [{ARGUMENTS}+{offset}];"

    body = re.sub(
        rf"\tld\.global\.(?:nc\.)?(?P<type>(?:v[24]\.)?[a-z]\d+) \t(?P<to>{_REGISTER}|\{{[^}}]*\}}), "
        rf"\[(?P<base>{_REGISTER})(?:\+(?P<offset>\d+))?\];",
        read,
        body,
    )
    for gone in (names | bases.keys() | set(pointers)) - {struct}:
        if re.search(rf"{gone}(?!\d)", body):
            raise Unpatchable(f"uses the address of its arguments in another way ({gone})")
    if struct in body:
        raise Unpatchable("uses the runtime or the result buffer")
    return body


_LOAD = re.compile(
    rf"\tld\.(?:global\.)?(?P<type>[ubsf]32) \t(?P<register>{_REGISTER}), \[(?P<base>%rd\d+)(?:\+(?P<offset>\d+))?\];"
)
_STORE = re.compile(
    rf"\tst\.(?:global\.)?(?P<type>[ubsf]32) \t\[(?P<base>%rd\d+)(?:\+(?P<offset>\d+))?\], (?P<register>{_REGISTER});"
)
_ORDERED = re.compile(r"^\s*(st|bar|bra|atom|red|membar|fence|call|ret|@)|:")
_ORDERED_OR_LOAD = re.compile(r"^\s*(ld\.(?!param)|st|bar|bra|atom|red|membar|fence|call|ret|@)|:")


def _whole_words(body: str) -> str:
    """Join the halves of 64-bit words that are moved 32 bits at a time, where the address is known to be a word's."""
    lines = body.split("\n")
    words = _word_addresses(body)
    joined = False
    for form, ordered in ((_LOAD, _ORDERED), (_STORE, _ORDERED_OR_LOAD)):
        for i, line in enumerate(lines):
            half = form.match(line)
            if half is None or half["base"] not in words:
                continue
            j = _other_half(lines, i, half, form, ordered)
            if j is not None:
                other = form.match(lines[j])
                assert other is not None
                low, high = sorted((half, other), key=_offset)
                if form is _LOAD:  # where the first half was read
                    lines[i], lines[j] = _read_word(low, high), ""
                else:  # where the second was written
                    lines[i], lines[j] = "", _write_word(low, high)
                joined = True
    text = "\n".join(lines)
    return text.replace("{\n", "{\n\t.reg .b32 \t%half<2>;\n", 1) if joined else text


def _offset(half: re.Match[str]) -> int:
    return int(half["offset"] or 0)


def _word_addresses(body: str) -> set[str]:
    """Registers that hold the start of an array, read from the arguments, plus a multiple of eight."""
    defined: dict[str, list[str]] = {}
    for line in _statements(body):
        parts = line.split(None, 1)
        if len(parts) == 2 and not parts[0].startswith(("st", "bra", "@", "bar")):
            defined.setdefault(parts[1].split(",")[0].rstrip(";"), []).append(line)

    def is_(register: str, form: str) -> bool:
        return len(defined.get(register, ())) == 1 and re.fullmatch(form, defined[register][0]) is not None

    found = set()
    for register, lines in defined.items():
        sum_of = re.fullmatch(rf"add\.s64 {register}, (%rd\d+), (%rd\d+);", lines[0]) if len(lines) == 1 else None
        if sum_of:
            for a, b in (sum_of.groups(), sum_of.groups()[::-1]):
                is_array = is_(a, rf"ld\.param\.u64 {a}, \[{ARGUMENTS}\+\d+\];")
                if is_array and is_(b, rf"(mul\.wide\.[su]32 {b}, %r\d+, 8|shl\.b64 {b}, %rd\d+, 3);"):
                    found.add(register)
    return found


def _other_half(
    lines: list[str], i: int, half: re.Match[str], form: re.Pattern[str], ordered: re.Pattern[str]
) -> int | None:
    """The line that moves the rest of the word of line i, if nothing in between depends on which comes first."""
    for j in range(i + 1, len(lines)):
        other = form.match(lines[j])
        if other and other["base"] == half["base"] and _offset(other) == _offset(half) ^ 4:
            # A load is moved up to line i, a store down to line j: what it reads or sets must be the same there.
            moved = other["register"] if form is _LOAD else half["register"]
            kept = [re.compile(rf"{re.escape(r)}(?!\d)") for r in (moved, half["base"])]
            between = lines[i + 1 : j]
            free = not any(kept[0].search(line) for line in between) if form is _LOAD else True
            unset = not any(r.search(line.partition(",")[0]) for r in kept for line in between)
            return j if free and unset else None
        if ordered.search(lines[j]):
            return None
    return None


def _read_word(low: re.Match[str], high: re.Match[str]) -> str:
    word = f"\tld.global.v2.b32 \t{{%half0, %half1}}, [{low['base']}+{_offset(low)}];"
    return "\n".join([word, *(_from_half(half, n) for n, half in enumerate((low, high)))])


def _write_word(low: re.Match[str], high: re.Match[str]) -> str:
    word = f"\tst.global.v2.b32 \t[{low['base']}+{_offset(low)}], {{%half0, %half1}};"
    return "\n".join([*(_to_half(half["register"], n) for n, half in enumerate((low, high))), word])


def _from_half(half: re.Match[str], n: int) -> str:
    if half["register"].startswith("%rd"):
        return f"\tcvt.{'s64.s32' if half['type'] == 's32' else 'u64.u32'} \t{half['register']}, %half{n};"
    return f"\tmov.b32 \t{half['register']}, %half{n};"


def _to_half(register: str, n: int) -> str:
    return (
        f"\tcvt.u32.u64 \t%half{n}, {register};" if register.startswith("%rd") else f"\tmov.b32 \t%half{n}, {register};"
    )


_SHIFT = re.compile(r"\tshr\.u64 \t(%rd\d+), (%rd\d+), (16|32|48);")
_NARROW = re.compile(r"\tcvt\.u16\.u64 \t(%rs\d+), (%rd\d+);")


def _quarters(body: str) -> str:
    """Take 16-bit elements out of 64-bit words as parts of registers, which conversions read without a shift."""
    lines, shifted = body.split("\n"), dict[str, tuple[str, int]]()
    changed = False
    for i, line in enumerate(lines):
        narrow = _NARROW.match(line)
        if narrow and narrow[2] in shifted:
            word, n = shifted[narrow[2]]
            parts = "{%quarter0, %quarter1, %quarter2, %quarter3}"
            lines[i] = f"\tmov.b64 \t{parts}, {word};\n\tmov.b16 \t{narrow[1]}, %quarter{n};"
            changed = True
            continue
        if ":" in line or line.startswith(("\tbra", "\t@")):  # another path may come in, with other words
            shifted.clear()
            continue
        set_here = set(re.findall(r"%rd\d+", line.partition("[" if "{" in line else ", ")[0]))
        shifted = {a: (word, n) for a, (word, n) in shifted.items() if not {a, word} & set_here}
        shift = _SHIFT.match(line)
        if shift and shift[1] != shift[2]:
            shifted[shift[1]] = shift[2], int(shift[3]) // 16
    text = "\n".join(lines)
    return text.replace("{\n", "{\n\t.reg .b16 \t%quarter<4>;\n", 1) if changed else text
