"""C++ of the Metal source that SPIRV-Cross writes, in which arrays, numbers and parameters are not C++."""

import re
from typing import NamedTuple

MOST_BUFFERS, MOST_THREADGROUP_BYTES = 31, 32 << 10  # that Metal has
BYTES = {"int": 4, "uint": 4, "float": 4, "ushort": 2, "short": 2, "uchar": 1, "char": 1, "ulong": 8, "long": 8}
BUILTINS = {
    "thread_position_in_grid": "p.grid",
    "threadgroups_per_grid": "on_cpu::uint3(on_cpu::launch->groups)",
    "thread_position_in_threadgroup": "p.in_group",
    "threadgroup_position_in_grid": "p.group",
    "thread_index_in_threadgroup": "p.index",
    "thread_index_in_simdgroup": "p.lane",
    "simdgroup_index_in_threadgroup": "p.simd",
    "threads_per_simdgroup": "on_cpu::launch->simd_width",
}
UNKNOWN = re.compile(r"\bthreadgroup\b|\bdouble\b|\batomic_\w+|\bdevice \w+\*")


class Parameters(NamedTuple):
    """What C++ has instead of the parameters of a Metal function."""

    globals: list[str]  # a pointer to each device buffer, since a fiber's function takes no arguments
    locals: list[str]  # the buffers, made by a launch
    given: list[str]  # what the function is called with
    arguments: str  # the struct of the constant buffer, or ""


class NotMetal(Exception):
    """Metal would not take this source, or it says what we have no C++ for."""


def cpp_source(metal, offsets=()):
    """The C++ of a Metal source with one function, which it exports as `run_metal`.

    `offsets` are where the members of the constant buffer's struct have to lie.
    """
    (threads,) = re.findall(r"gl_WorkGroupSize .*= uint3\((\d+)u, 1u, 1u\)", metal)
    shared = re.findall(r"\bthreadgroup (\w+) (\w+)\[(\d+)\];", metal)
    size = sum(BYTES[kind] * int(count) for kind, _, count in shared)
    if size > MOST_THREADGROUP_BYTES:
        raise NotMetal(f"{size} bytes of threadgroup memory; Metal has {MOST_THREADGROUP_BYTES}")
    (listed,) = re.findall(r"^kernel void main0\((.*)\)$", metal, re.MULTILINE)
    text = re.sub(r"\bthreadgroup (\w+) (\w+)\[(\d+)\];", r'static on_cpu::shared_array<\1, \3> \2("\2");', metal)
    text = re.sub(r"\b\d+\.\d+(e[+-]?\d+)?\b", r"\g<0>f", text)  # Metal has no double
    parameters = parsed(listed)
    for struct in re.findall(r"device (\w+)&", listed):
        text, changed = re.subn(
            rf"(struct {struct}\s*{{\s*)(\w+) _m0\[1\];", r"\1on_cpu::device_array<\2> _m0;", text, count=1
        )
        assert changed, f"{struct} is not an array"
    if found := UNKNOWN.search(text.replace(f"kernel void main0({listed})", "")):
        raise NotMetal(f"{found[0]}: not in Metal, or without C++")
    checks = [f"static_assert(offsetof({parameters.arguments}, _m{n}) == {at});" for n, at in enumerate(offsets)]
    together = "true" if re.search(r"\bthreadgroup_barrier\(|\bsimd_\w+\(", text) else "false"
    return "\n".join(
        [
            text,
            *parameters.globals,
            *checks,
            f"static void one(const on_cpu::Position& p) {{ main0({', '.join(parameters.given)}); }}",
            'extern "C" __attribute__((visibility("default"))) int run_metal(metal_launch* this_launch) {',
            "    on_cpu::launch = this_launch;",
            *parameters.locals,
            f"    return on_cpu::run(this_launch, {threads}, {together}, one);",
            "}",
            "",
        ]
    )


def parsed(listed):
    """The `Parameters` of a Metal function."""
    found = Parameters([], [], [], "")
    for parameter in re.split(r", (?=constant|device|uint)", listed):
        kind, name, attribute = re.fullmatch(r"(.*?)&? ?(\w+) \[\[(.*)\]\]", parameter).groups()
        if attribute in BUILTINS:
            found.given.append(BUILTINS[attribute])
            continue
        number = int(re.fullmatch(r"buffer\((\d+)\)", attribute)[1])
        if number >= MOST_BUFFERS:
            raise NotMetal(f"{attribute}; Metal has {MOST_BUFFERS}")
        space, struct = kind.split()
        if space == "constant":
            found = found._replace(arguments=struct)
            found.given.append(f"*static_cast<const {struct}*>(on_cpu::launch->data[{number}])")
        else:
            found.globals.append(f"static {struct}* at_{name};")
            found.locals.append(f'    {struct} {name}{{{{{number}, "{name}"}}}};\n    at_{name} = &{name};')
            found.given.append(f"*at_{name}")
    return found
