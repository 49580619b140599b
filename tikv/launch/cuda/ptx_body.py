"""Put the body of a long loop, which LLVM leaves as a function, into the entry that calls it.

LLVM inlines a function that is called from one place, unless it is very long. Such a kernel cannot stay as it is: only
an entry takes its arguments by value, and products of warpgroups and registers that warpgroups exchange work within one
function only.
"""

from __future__ import annotations

import re

from tikv.launch.cuda.ptx_text import REGISTER, statements

_FUNCTION = re.compile(
    r"\.func function_body\(\n"
    r"\t\.param \.b64 function_body_param_0,\n\t\.param \.b64 function_body_param_1,\n"
    r"\t\.param \.b32 function_body_param_2\n\)[^{]*\{\n"
    r"(?P<registers>(?:\t\.[^\n]*\n)*)(?P<body>.*?)\n\}\n",
    re.S,
)
_DECLARATION = re.compile(r"\.func function_body\n\([^)]*\)\n;\n")
_CALLER = re.compile(
    r"\.visible \.entry (?P<name>\w+)\((?P<struct>[^)]*)\)(?P<bounds>[^{]*)\{\n(?P<body>.*?)\n\}", re.S
)
_R = REGISTER
# The struct is copied, the bound of the loop is read, and each step calls the function with the copy and the item.
_LOOP = re.compile(
    rf"mov\.u64 %SPL, \w+;cvta\.local\.u64 %SP, %SPL;add\.u64 (?P<copy>{_R}), %SP, 0;add\.u64 (?P<own>{_R}), %SPL, 0;"
    rf"(?:ld\.param\.u(?:32|64) {_R}, \[(?P<struct>\w+)\+(?:24|16)\];){{2}}"
    rf"ld\.param\.u64 (?P<runtime>{_R}), \[(?P=struct)\+8\];ld\.param\.u64 {_R}, \[(?P=struct)\];"
    rf"(?:st\.local\.u(?:32|64) \[(?P=own)(?:\+\d+)?\], {_R};){{4}}"
    rf"cvta\.to\.global\.u64 (?P<base>{_R}), (?P=runtime);ld\.global\.u64 (?P<at>{_R}), \[(?P=base)\+(?P<where>\d+)\];"
    rf"ld\.u32 (?P<end>{_R}), \[(?P=at)\];mov\.u32 (?P<thread>{_R}), %tid\.x;mov\.u32 (?P<threads>{_R}), %ntid\.x;"
    rf"mov\.u32 (?P<block>{_R}), %ctaid\.x;mad\.lo\.s32 (?P<item>{_R}), (?P=threads), (?P=block), (?P=thread);"
    rf"setp\.ge\.s32 (?P<past>{_R}), (?P=item), (?P=end);@(?P=past) bra \$\w+;mov\.u32 (?P<blocks>{_R}), %nctaid\.x;"
    rf"mul\.lo\.s32 (?P<step>{_R}), (?P=threads), (?P=blocks);st\.param\.b64 \[param0\+0\], (?P=copy);"
    rf"st\.param\.b64 \[param1\+0\], {_R};st\.param\.b32 \[param2\+0\], (?P=item);\);"
    rf"add\.s32 (?P=item), (?P=item), (?P=step);setp\.lt\.s32 (?P<more>{_R}), (?P=item), (?P=end);"
    rf"@(?P=more) bra \$\w+;ret;"
)


def inlined(ptx: str) -> str:
    """The PTX of a kernel without a function of its loop's body; unchanged without one, or with one of another form."""
    function, callers = _FUNCTION.search(ptx), list(_CALLER.finditer(ptx))
    if function is None or not callers:
        return ptx
    caller = callers[-1]
    loop = _LOOP.fullmatch("".join(statements(caller["body"])))
    if loop is None or loop["struct"] not in caller["struct"]:
        return ptx
    item = _for_item(function["body"], loop["struct"])
    if "function_body" in item:
        return ptx
    entry = f""".visible .entry {caller["name"]}({caller["struct"]}){caller["bounds"]}{{
{function["registers"]}\t.reg .pred \t%more<1>;
\t.reg .b32 \t%loop<6>;
\t.reg .b64 \t%runtime<4>;

\tld.param.u64 \t%runtime0, [{loop["struct"]}+8];
\tcvta.to.global.u64 \t%runtime1, %runtime0;
\tld.global.u64 \t%runtime2, [%runtime1+{loop["where"]}];
\tld.u32 \t%loop0, [%runtime2];
\tmov.u32 \t%loop1, %tid.x;
\tmov.u32 \t%loop2, %ntid.x;
\tmov.u32 \t%loop3, %ctaid.x;
\tmad.lo.s32 \t%loop4, %loop2, %loop3, %loop1;
\tmov.u32 \t%loop5, %nctaid.x;
\tmul.lo.s32 \t%loop5, %loop2, %loop5;
\tsetp.ge.s32 \t%more0, %loop4, %loop0;
\t@%more0 bra \t$loop_end;
$loop_item:
{item}
$loop_next:
\tadd.s32 \t%loop4, %loop4, %loop5;
\tsetp.lt.s32 \t%more0, %loop4, %loop0;
\t@%more0 bra \t$loop_item;
$loop_end:
\tret;
}}"""
    ptx = ptx[: function.start()] + ptx[function.end() :]
    return _DECLARATION.sub("", ptx.replace(caller.group(0), entry))


def _for_item(body: str, struct: str) -> str:
    """The body of the function for item %loop4, with the struct's own address for that of its copy."""
    body = re.sub(rf"\tld\.param\.u32 \t({_R}), \[function_body_param_2\];", r"\tmov.u32 \t\1, %loop4;", body)
    body = body.replace("\tret;", "\tbra \t$loop_next;")
    copies = rf"\tld\.param\.u64 \t({_R}), \[function_body_param_0\];\n"
    for copy in re.findall(copies, body):
        pointers = rf"\tld\.u64 \t({_R}), \[{copy}\];\n"
        bases = re.findall(pointers, body)  # registers that hold the arguments' address, or that of some of them
        for base in tuple(bases):
            bases += re.findall(rf"\tadd\.s64 \t({_R}), {base}, \d+;\n", body)
        read = r"\tld.param.u64 \t%runtime3, [" + struct + r"];\n\tcvta.to.global.u64 \t\1, %runtime3;\n"
        body = re.sub(pointers, read, body)
        for base in bases:
            body = re.sub(rf"\tld\.((?:v[24]\.)?[a-z]\d+ \t[^\[\n]*\[{base}[+\]])", r"\tld.global.\1", body)
    return re.sub(copies, rf"\tmov.u64 \t\1, {struct};\n", body)
