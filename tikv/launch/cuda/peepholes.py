"""Rewrites of an entry's body that make it faster and change no result; each names the bench that shows its effect.

A rewrite that does not find its pattern leaves the text unchanged.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from tikv.launch.cuda.ptx_text import ARGUMENTS, REGISTER, statements

_INSTRUCTION = re.compile(r"^\t[a-z@]", re.M)


def resident_blocks(body: str, count: int) -> str:
    """Have the assembler save registers, so that a multiprocessor holds this many blocks at once.

    Taichi asks for two. benches/ops/bench_attention.py shows the effect of each kernel's count.
    """
    return re.sub(r"\.minnctapersm \d+", f".minnctapersm {count}", body)


def early_start(head: str, body: str) -> tuple[str, str]:
    """Start before the previous launch has ended, and wait for its end before the first instruction; (head, body).

    The head asks for the version and the GPU that have the two instructions. The captured step in
    benches/launch/bench_cuda.py shows the effect on consecutive launches.
    """
    head = re.sub(r"\.target sm_\d+", ".target sm_90", re.sub(r"\.version \d\.\d", ".version 7.8", head))
    body = _INSTRUCTION.sub(r"\tgriddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;\n\g<0>", body, count=1)
    return head, body


_LOAD = re.compile(
    rf"\tld\.(?:global\.)?(?P<type>[ubsf]32) \t(?P<register>{REGISTER}), \[(?P<base>%rd\d+)(?:\+(?P<offset>\d+))?\];"
)
_STORE = re.compile(
    rf"\tst\.(?:global\.)?(?P<type>[ubsf]32) \t\[(?P<base>%rd\d+)(?:\+(?P<offset>\d+))?\], (?P<register>{REGISTER});"
)
_ORDERED = re.compile(r"^\s*(st|bar|bra|atom|red|membar|fence|call|ret|@)|:")
_ORDERED_OR_LOAD = re.compile(r"^\s*(ld\.(?!param)|st|bar|bra|atom|red|membar|fence|call|ret|@)|:")


def whole_words(body: str) -> str:
    """Join the halves of 64-bit words that are moved 32 bits at a time, if the address is known to be a word's.

    Taichi generates the halves. benches/ops/bench_copy.py and benches/ops/bench_paged.py show the effect.
    """
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
                if form is _LOAD:  # the word is read where the first half was
                    lines[i], lines[j] = _read_word(low, high), ""
                else:  # the word is written where the second half was
                    lines[i], lines[j] = "", _write_word(low, high)
                joined = True
    text = "\n".join(lines)
    return text.replace("{\n", "{\n\t.reg .b32 \t%half<2>;\n", 1) if joined else text


def _offset(half: re.Match[str]) -> int:
    return int(half["offset"] or 0)


def _word_addresses(body: str) -> set[str]:
    """Registers that hold the start of an array, read from the arguments, plus a multiple of eight."""
    defined: dict[str, list[str]] = {}
    for line in statements(body):
        parts = line.split(None, 1)
        if len(parts) == 2 and not parts[0].startswith(("st", "bra", "@", "bar")):
            defined.setdefault(parts[1].split(",")[0].rstrip(";"), []).append(line)

    def is_(register: str, form: str) -> bool:
        return len(defined.get(register, ())) == 1 and re.fullmatch(form, defined[register][0]) is not None

    registers = set()
    for register, lines in defined.items():
        sum_of = re.fullmatch(rf"add\.s64 {register}, (%rd\d+), (%rd\d+);", lines[0]) if len(lines) == 1 else None
        if sum_of:
            for a, b in (sum_of.groups(), sum_of.groups()[::-1]):
                is_array = is_(a, rf"ld\.param\.u64 {a}, \[{ARGUMENTS}\+\d+\];")
                if is_array and is_(b, rf"(mul\.wide\.[su]32 {b}, %r\d+, 8|shl\.b64 {b}, %rd\d+, 3);"):
                    registers.add(register)
    return registers


def _other_half(
    lines: list[str], i: int, half: re.Match[str], form: re.Pattern[str], ordered: re.Pattern[str]
) -> int | None:
    """The line that moves the other half of the word in line i, if no line in between depends on their order."""
    for j in range(i + 1, len(lines)):
        other = form.match(lines[j])
        if other and other["base"] == half["base"] and _offset(other) == _offset(half) ^ 4:
            # A load is moved up to line i, a store down to line j: its registers must have the same values there.
            moved = other["register"] if form is _LOAD else half["register"]
            patterns = [re.compile(rf"{re.escape(r)}(?!\d)") for r in (moved, half["base"])]
            between = lines[i + 1 : j]
            free = not any(patterns[0].search(line) for line in between) if form is _LOAD else True
            unset = not any(r.search(line.partition(",")[0]) for r in patterns for line in between)
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


def quarters(body: str) -> str:
    """Take 16-bit elements out of 64-bit words as parts of registers, which conversions read without a shift.

    Taichi shifts each element out. benches/ops/bench_attention.py shows the effect with float16 and bfloat16.
    """
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
        if ":" in line or line.startswith(("\tbra", "\t@")):  # another path may join here, with other words
            shifted.clear()
            continue
        set_here = set(re.findall(r"%rd\d+", line.partition("[" if "{" in line else ", ")[0]))
        shifted = {a: (word, n) for a, (word, n) in shifted.items() if not {a, word} & set_here}
        shift = _SHIFT.match(line)
        if shift and shift[1] != shift[2]:
            shifted[shift[1]] = shift[2], int(shift[3]) // 16
    text = "\n".join(lines)
    return text.replace("{\n", "{\n\t.reg .b16 \t%quarter<4>;\n", 1) if changed else text


_ADD = re.compile(r"\tadd\.s32 \t(%r\d+), (%r\d+), (-?\d+);$")
_SCALE = re.compile(r"\tmul\.wide\.s32 \t(%rd\d+), (%r\d+), (\d+);$")
_SUM = re.compile(r"\tadd\.s64 \t(%rd\d+), (%rd\d+), (%rd\d+);$")
_POINTER = re.compile(rf"\tld\.param\.u64 \t(%rd\d+), \[({ARGUMENTS}\+\d+)\];$")
_WORD = re.compile(r"\tld\.global\.v2\.b32 \t\{%half0, %half1\}, \[(%rd\d+)\+0\];$")
_JOINS = re.compile(r"^\$?\w+:")  # another path may join here
_NOT_OVER = re.compile(r"^\$?\w+:|^\t(st|bar|bra|@|membar|fence|atom|red|call|ret)")


class _Address(NamedTuple):
    """An address as a register plus a number of bytes."""

    base: str
    behind: int


def pairs(body: str) -> str:
    """Read two neighbouring 64-bit words as one word of 128 bits, after `whole_words`.

    A kernel must declare that this is allowed: the first of the words that it addresses by one register and constants
    lies at a multiple of 16 bytes, and sums of 32-bit indices do not wrap. Such addresses become that register plus a
    constant, which the load itself adds. benches/ops/bench_attention.py shows the effect with float16, and 4 and 8
    query heads per KV head.
    """
    lines = body.split("\n")
    addresses = _fold_addresses(lines)
    least: dict[str, int] = {}
    for address in addresses.values():
        least[address.base] = min(address.behind, least.get(address.base, 0))
    joined = False
    for i, line in enumerate(lines):
        first = _WORD.match(line)
        if first is None or first[1] not in addresses:
            continue
        address = addresses[first[1]]
        if (address.behind - least[address.base]) % 16:
            continue
        j = _next_word(lines, i, address, addresses)
        if j is not None:
            both = f"\tld.global.v4.b32 \t{{%quad0, %quad1, %quad2, %quad3}}, [{first[1]}+0];"
            lines[i] = f"{both}\n\tmov.b32 \t%half0, %quad0;\n\tmov.b32 \t%half1, %quad1;"
            lines[j] = "\tmov.b32 \t%half0, %quad2;\n\tmov.b32 \t%half1, %quad3;"
            joined = True
    text = "\n".join(lines)
    return text.replace("{\n", "{\n\t.reg .b32 \t%quad<4>;\n", 1) if joined else text


def _next_word(lines: list[str], i: int, address: _Address, addresses: dict[str, _Address]) -> int | None:
    """The next line that reads a word, if that word follows the one in line i and no barrier or jump is in between."""
    for j in range(i + 1, len(lines)):
        if _NOT_OVER.match(lines[j]):
            return None
        second = _WORD.match(lines[j])
        if second:
            return j if addresses.get(second[1]) == _Address(address.base, address.behind + 8) else None
    return None


def _fold_addresses(lines: list[str]) -> dict[str, _Address]:
    """Rewrite each address whose index differs by a constant from an earlier one; return them all.

    A register that only one line sets has one value. The value of any other register may change after each line that
    sets it, and where paths join.
    """
    count = Counter(register for line in lines for register in _set_by(line))
    addresses: dict[str, _Address] = {}
    steps: dict[str, tuple[str, int]] = {}  # an index as another index and a distance
    scaled: dict[str, tuple[str, int, int]] = {}  # an index, a number for its value, and the bytes of an element
    pointers: dict[str, str] = {}  # the argument that a register holds
    known: dict[tuple[str, str, int, int], tuple[str, int]] = {}  # by array, root of the index: address and step
    when = 0
    for i, line in enumerate(lines):
        if _JOINS.match(line):
            when, known = when + 1, {}
            continue
        to = _set_by(line)
        if any(count[register] > 1 for register in to):
            when += 1
            continue
        if (match := _ADD.match(line)) and count[match[2]] == 1:
            steps[match[1]] = match[2], int(match[3])
        elif match := _POINTER.match(line):
            pointers[match[1]] = match[2]
        elif match := _SCALE.match(line):
            scaled[match[1]] = match[2], when if count[match[2]] > 1 else 0, int(match[3])
        elif match := _SUM.match(line):
            array, index = (match[2], match[3]) if match[3] in scaled else (match[3], match[2])
            if index not in scaled or count[array] > 1:
                continue
            (root, value, size), step = scaled[index], 0
            while root in steps:
                root, more = steps[root]
                step += more
            address, first = known.setdefault((pointers.get(array, array), root, value, size), (match[1], step))
            if address != match[1]:
                lines[i] = f"\tadd.s64 \t{match[1]}, {address}, {(step - first) * size};"
            addresses[match[1]] = _Address(address, (step - first) * size)
    return addresses


def _set_by(line: str) -> list[str]:
    """The registers that an instruction sets; also those that a store or a jump names, which is harmless."""
    parts = line.split(None, 1)
    if len(parts) < 2 or parts[0].startswith((".", "//")):
        return []
    operands = parts[1]
    return re.findall(r"%\w+", operands[: operands.index("}")] if operands[0] == "{" else operands.split(",")[0])
