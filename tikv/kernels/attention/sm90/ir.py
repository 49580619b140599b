"""Writes `hopper.ll`: what compute capability 9.0 does for kernels of attention, as functions that LLVM inlines.

    python -m tikv.kernels.attention.sm90.ir > hopper.ll
    llvm-as-14 hopper.ll -o tikv/kernels/attention/sm90/hopper.bc

Arguments are pointers to local variables of a kernel, the only ones that Taichi hands out. Instructions that only
sm_90a has stand behind `UNCOVERED`, as comments: Taichi gives its text to the driver for an older target, and
`launch.cuda.ptx` uncovers them in the text that is launched.

A product is of a warpgroup, 4 warps, and runs while they go on. Its sums are registers that nobody may touch until
they have been waited for: so a function that waits takes them in and hands them out again.
"""

import itertools
from collections.abc import Iterable

UNCOVERED = "//!"  # see `launch.cuda.ptx.uncovered`
PANEL = 128  # bytes of a row in shared memory: 64 halves, whose pieces of 16 bytes are exchanged by the row's number
DESCRIPTOR = 1 << 30 | 8 * PANEL >> 4  # its upper half: 128 bytes are exchanged, 8 rows are so far from the next
STEP = 16  # columns, or keys, of one product
CODES_STEP = 32  # of a product of codes of 8 bits
ROWS = 64  # of the product of a warpgroup
QUERY_ROWS = 128  # that lie in shared memory: those of two warpgroups
# Warpgroups that produce and that consume; registers of a thread at first, of one that produces, and that consumes.
REGISTERS = ((1, 2, 168, 72, 216), (2, 2, 128, 56, 200), (2, 1, 168, 128, 248))
SHAPES = ((64, 128), (96, 128), (128, 128), (256, 64))  # (width of the heads, keys of a tile)
HALVES = ("f16", "bf16")
SUMS = {"e4m3": "f32", "s8": "s32"}  # 8-bit operands of products, and what their sums are
LATENT = (576, 512, 64)  # columns of a latent, the first of which are its values; keys of a tile
LATENT_ROWS = ((16, 1), (64, 2))  # query rows of a block, and the warpgroups that consume
LETTER = {"float": "f", "i32": "r", "i64": "l"}  # of a register, in the constraints of inline assembly

HEAD = """; Written by ir.py, which says what it is.

target triple = "nvptx64-nvidia-cuda"

@hopper_shared = external addrspace(3) global [0 x i8], align 1024

; where the shared memory of a block begins
define void @shared_memory(i32* %r) alwaysinline {
  %x = ptrtoint [0 x i8] addrspace(3)* @hopper_shared to i32
  store i32 %x, i32* %r
  ret void
}

declare float @llvm.nvvm.ex2.approx.ftz.f(float)
declare float @llvm.nvvm.rcp.approx.ftz.f(float)
declare <2 x half> @llvm.nvvm.ff2f16x2.rn(float, float)
declare i32 @llvm.nvvm.ff2bf16x2.rn(float, float)

; 2 ** x, within 2 ** -22 of it relatively; subnormals are 0
define void @exp2(float* %r, float* %p) alwaysinline {
  %x = load float, float* %p
  %y = call float @llvm.nvvm.ex2.approx.ftz.f(float %x)
  store float %y, float* %r
  ret void
}

; 1 / x, within 2 ** -23 of it relatively
define void @inverse(float* %r, float* %p) alwaysinline {
  %x = load float, float* %p
  %y = call float @llvm.nvvm.rcp.approx.ftz.f(float %x)
  store float %y, float* %r
  ret void
}

; two floats, rounded to the nearest, as halves of a register
define void @pack_f16(i32* %r, float* %p0, float* %p1) alwaysinline {
  %low = load float, float* %p0
  %high = load float, float* %p1
  %x = call <2 x half> @llvm.nvvm.ff2f16x2.rn(float %high, float %low)
  %y = bitcast <2 x half> %x to i32
  store i32 %y, i32* %r
  ret void
}

define void @pack_bf16(i32* %r, float* %p0, float* %p1) alwaysinline {
  %low = load float, float* %p0
  %high = load float, float* %p1
  %x = call i32 @llvm.nvvm.ff2bf16x2.rn(float %high, float %low)
  store i32 %x, i32* %r
  ret void
}
"""


def function(
    name: str, comment: str, lines: Iterable[str], inputs: Iterable[str] = (), made: Iterable[str] = (),
    changed: Iterable[str] = (), pure: bool = False,
) -> str:  # fmt: skip
    """A function around inline assembly, whose operands are `made`, `changed` and `inputs`, in this order: their types.

    In `lines`, $n is the operand's register. A function that is not `pure` is not moved across others that are not.
    """
    made, changed, inputs = list(made), list(changed), list(inputs)
    outputs = made + changed
    types = outputs + inputs
    parameters = ", ".join(f"{t}* %p{n}" for n, t in enumerate(types))
    body = [f"  %x{n} = load {t}, {t}* %p{n}" for n, t in enumerate(types) if n >= len(made)]
    result = f"{{ {', '.join(outputs)} }}" if len(outputs) > 1 else (outputs or ["void"])[0]
    constraints = [f"={LETTER[t]}" for t in outputs]
    tied = [str(len(made) + n) for n in range(len(changed))]
    constraints += [LETTER[t] for t in inputs] + tied + ([] if pure else ["~{memory}"])
    values = [f"{t} %x{len(outputs) + n}" for n, t in enumerate(inputs)]
    values += [f"{t} %x{len(made) + n}" for n, t in enumerate(changed)]
    text = "\\0A\\09".join(lines)
    call = f'call {result} asm {"" if pure else "sideeffect "}"{text}", "{",".join(constraints)}"({", ".join(values)})'
    call += "" if pure else " convergent"
    body.append(f"  %r = {call}" if outputs else f"  {call}")
    for n, t in enumerate(outputs):
        value = "%r"
        if len(outputs) > 1:
            body.append(f"  %y{n} = extractvalue {result} %r, {n}")
            value = f"%y{n}"
        body.append(f"  store {t} {value}, {t}* %p{n}")
    kind = "alwaysinline" if pure else "alwaysinline convergent"
    return "\n".join([f"; {comment}", f"define void @{name}({parameters}) {kind} {{", *body, "  ret void", "}", ""])


def uncovered(*lines: str) -> list[str]:
    """Lines that only sm_90a knows."""
    return [UNCOVERED + line for line in lines]


def descriptor(name: str, low: str, behind: int) -> list[str]:
    """Lines that make a descriptor of its lower half, plus bytes behind where that begins."""
    return [f"add.s32 low, {low}, {behind >> 4};", f"mov.b64 {name}, {{low, {DESCRIPTOR}}};"]


def scores(half: str, width: int, keys: int) -> str:
    """S = Q K^T of a tile. Q and K lie in shared memory in panels of 64 columns, one after the other."""
    lines, count = _scored(half, width, (QUERY_ROWS, keys), keys, "q, k")
    comment = "S = Q K^T is under way, by the lower halves of the descriptors of Q and K"
    return function(f"scores_{half}_{width}", comment, lines, inputs=["i32"] * 2, made=["float"] * count)


def _scored(half: str, width: int, rows: tuple[int, int], columns: int, factors: str) -> tuple[list[str], int]:
    """(the lines that multiply rows of Q and K in shared memory, how many sums a lane gets).

    `factors` names the two operands, of which the second is transposed; their product has `columns` columns.
    """
    count = columns // 2
    sums = ", ".join(f"${n}" for n in range(count))
    lines = ["wgmma.fence.sync.aligned;", "{", ".reg .b64 q, k;", ".reg .b32 low;"]
    for n in range(width // STEP):
        panel, inside = divmod(n * STEP * 2, PANEL)
        of_q, of_k = (panel * each * PANEL + inside for each in rows)
        lines += [*descriptor("q", f"${count}", of_q), *descriptor("k", f"${count + 1}", of_k)]
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{half}.{half} {{{sums}}}, {factors}, {int(n > 0)}, "
            "1, 1, 0, 0;"
        )
    lines += ["}", "wgmma.commit_group.sync.aligned;"]
    return uncovered(*lines), count


def values(half: str, width: int, keys: int) -> str:
    """O += P V of a tile: P in registers, V in shared memory, keys times columns as it lies in the cache."""
    count, weights = width // 2, keys // 4
    sums = ", ".join(f"${n}" for n in range(count))
    lines = ["wgmma.fence.sync.aligned;", "{", ".reg .b64 v;", ".reg .b32 low;", ".reg .pred more;"]
    lines.append(f"setp.ne.b32 more, ${count + weights + 1}, 0;")
    for n in range(keys // STEP):
        a = ", ".join(f"${count + 4 * n + i}" for i in range(4))
        lines += descriptor("v", f"${count + weights}", n * STEP * PANEL)
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{half}.{half} {{{sums}}}, {{{a}}}, v, "
            f"{1 if n else 'more'}, 1, 1, 1;"
        )
    lines += ["}", "wgmma.commit_group.sync.aligned;"]
    comment = "O += P V is under way, by the halves of P and the lower half of V's descriptor; O = P V without `more`"
    return function(
        f"values_{half}_{width}", comment, uncovered(*lines), changed=["float"] * count,
        inputs=[*["i32"] * weights, "i32", "i32"],
    )  # fmt: skip


def scores_of_codes(kind: str, width: int, keys: int) -> str:
    """S = Q K^T of a tile of codes of 8 bits, in panels of 128 columns: integers have sums that are integers."""
    count, floats = keys // 2, SUMS[kind] == "f32"
    sums = ", ".join(f"${n}" for n in range(count))
    lines = ["wgmma.fence.sync.aligned;", "{", ".reg .b64 q, k;", ".reg .b32 low;"]
    for n in range(width // CODES_STEP):
        panel, inside = divmod(n * CODES_STEP, PANEL)
        of_q, of_k = (panel * each * PANEL + inside for each in (QUERY_ROWS, keys))
        lines += [*descriptor("q", f"${count}", of_q), *descriptor("k", f"${count + 1}", of_k)]
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{keys}k32.{SUMS[kind]}.{kind}.{kind} {{{sums}}}, q, k, {int(n > 0)}"
            f"{', 1, 1' if floats else ''};"
        )
    lines += ["}", "wgmma.commit_group.sync.aligned;"]
    comment = "S = Q K^T of codes is under way, by the lower halves of the descriptors of Q and K"
    return function(f"scores_{kind}_{width}", comment, uncovered(*lines), inputs=["i32"] * 2,
                    made=["float" if floats else "i32"] * count)  # fmt: skip


def values_of_codes(kind: str, width: int, keys: int) -> str:
    """O += P V of a tile of 8-bit floats: P in registers, V in shared memory, a row of keys for each column.

    Of 16 keys a lane has weights of two and, 8 further on, of two more. Its operand takes four that follow one
    another: so the keys of V lie in the order 0, 1, 8, 9, 2, 3, 10, 11 and so on.
    """
    count, weights = width // 2, keys // 8
    sums = ", ".join(f"${n}" for n in range(count))
    lines = ["wgmma.fence.sync.aligned;", "{", ".reg .b64 v;", ".reg .b32 low;", ".reg .pred more;"]
    lines.append(f"setp.ne.b32 more, ${count + weights + 1}, 0;")
    for n in range(keys // CODES_STEP):
        a = ", ".join(f"${count + 4 * n + i}" for i in range(4))
        lines += descriptor("v", f"${count + weights}", n * CODES_STEP)
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{width}k32.f32.{kind}.{kind} {{{sums}}}, {{{a}}}, v, "
            f"{1 if n else 'more'}, 1, 1;"
        )
    lines += ["}", "wgmma.commit_group.sync.aligned;"]
    comment = "O += P V is under way, by codes of P and the lower half of V's descriptor; O = P V without `more`"
    return function(
        f"values_{kind}_{width}", comment, uncovered(*lines), changed=["float"] * count,
        inputs=[*["i32"] * weights, "i32", "i32"],
    )  # fmt: skip


def for_codes() -> list[str]:
    """Short functions for products of codes of 8 bits."""
    turn = [f"prmt.b32 h{2 * n + odd}, ${2 * n + 1}, ${2 * n + 2}, {('0x6420', '0x7531')[odd]};"
            for n in range(2) for odd in range(2)]  # fmt: skip
    counts = sorted({keys // 2 for _, keys in SHAPES})
    return [
        *(function(f"wait_integers_{count}", "all products but the last 1 are done",
                   uncovered("wgmma.wait_group.sync.aligned 1;"), changed=["i32"] * count) for count in counts),
        function("fetch_16", "16 bytes of memory", ["ld.global.v4.u32 {$0, $1, $2, $3}, [$4];"], made=["i32"] * 4,
                 inputs=["i64"]),
        function("read_8", "two floats of shared memory", ["ld.shared.v2.f32 {$0, $1}, [$2];"], made=["float"] * 2,
                 inputs=["i32"]),
        function("divide", "a / b, rounded to the nearest", ["div.rn.f32 $0, $1, $2;"], made=["float"],
                 inputs=["float"] * 2, pure=True),
        function("codes_e4m3", "four 8-bit floats, rounded to the nearest; what is too large is the largest",
                 uncovered("{", ".reg .b16 l, h;", "cvt.rn.satfinite.e4m3x2.f32 l, $2, $1;",
                           "cvt.rn.satfinite.e4m3x2.f32 h, $4, $3;", "mov.b32 $0, {l, h};", "}"),
                 made=["i32"], inputs=["float"] * 4, pure=True),
        function("codes_s8", "four integers of 8 bits, rounded to the nearest",
                 ["{", ".reg .s32 a, b, c, d;", ".reg .b32 h;",
                  *(f"cvt.rni.s32.f32 {x}, ${n + 1};" for n, x in enumerate("abcd")),
                  "cvt.pack.sat.s8.s32.b32 h, d, c, 0;", "cvt.pack.sat.s8.s32.b32 $0, b, a, h;", "}"],
                 made=["i32"], inputs=["float"] * 4, pure=True),
        function("read_turned", "four matrices of 8 keys x 16 codes from shared memory, transposed in pairs of codes; "
                 "a lane has a key's place",
                 uncovered("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];"),
                 made=["i32"] * 4, inputs=["i32"]),
        function("write_keys", "these to shared memory, as rows of 16 keys of two columns; a lane has a row's place",
                 uncovered("{", ".reg .b32 h0, h1, h2, h3;", *turn,
                           "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {h0, h1, h2, h3};", "}"),
                 inputs=["i32"] * 5),
    ]  # fmt: skip


def latent_scores(half: str, rows: int, consumers: int) -> str:
    """S^T = K Q^T of a tile of latents: its keys are the rows of the product, a warpgroup's query rows its columns."""
    width, _, keys = LATENT
    lines, count = _scored(half, width, (rows, keys), rows // consumers, "k, q")
    comment = "S^T = K Q^T is under way, by the lower halves of the descriptors of Q and K"
    return function(f"latent_scores_{half}_{rows}", comment, lines, inputs=["i32"] * 2, made=["float"] * count)


def latent_values(half: str, rows: int, consumers: int) -> str:
    """O^T += V^T P^T of a tile of latents, whose first columns are V: 64 columns of V are the rows of a product."""
    _, width, keys = LATENT
    panels, count = width // 64 // consumers, width // consumers // 64 * rows // 2
    lines = ["wgmma.fence.sync.aligned;", "{", ".reg .b64 v, p;", ".reg .b32 low;"]
    for n in range(keys // STEP):
        lines += descriptor("p", f"${count}", n * STEP * 2)
        for panel in range(panels):
            sums = ", ".join(f"${panel * rows // 2 + i}" for i in range(rows // 2))
            lines += descriptor("v", f"${count + 1}", (panel * keys + n * STEP) * PANEL)
            lines.append(
                f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{half}.{half} {{{sums}}}, v, p, 1, 1, 1, 1, 0;"
            )
    lines += ["}", "wgmma.commit_group.sync.aligned;"]
    comment = "O^T += V^T P^T is under way, by the lower halves of the descriptors of P and V"
    return function(
        f"latent_values_{half}_{rows}", comment, uncovered(*lines), changed=["float"] * count, inputs=["i32"] * 2
    )


def latent_results() -> list[str]:
    """Functions over the columns of a query row that a thread has: two, 8 apart, of each panel of its V."""
    functions = []
    for panels in sorted({LATENT[1] // 64 // consumers for _, consumers in LATENT_ROWS}):
        count = 2 * panels
        lines = [f"mul.f32 ${n}, ${n}, ${count};" for n in range(count)]
        functions.append(function(f"fade_{count}", "numbers times a factor", lines, changed=["float"] * count,
                                  inputs=["float"], pure=True))  # fmt: skip
        for kind, size, convert in (
            ("f32", 4, "mov.b32"),
            ("f16", 2, "cvt.rn.f16.f32"),
            ("bf16", 2, "cvt.rn.bf16.f32"),
        ):
            lines = ["{", ".reg .f32 x;", f".reg .b{8 * size} y;"]
            for n in range(count):
                lines += [f"mul.f32 x, ${n + 2}, $1;", f"{convert} y, x;",
                          f"st.global.b{8 * size} [$0+{(n // 2 * 64 + n % 2 * 8) * size}], y;"]  # fmt: skip
            comment = "numbers times a factor, to a row's columns from an address on"
            functions.append(function(f"store_{count}_{kind}", comment, uncovered(*lines, "}"),
                                      inputs=["i64", *["float"] * (count + 1)]))  # fmt: skip
    return functions


def waits() -> list[str]:
    """Waits for all products but the last `pending`, of which these registers are sums."""
    counts = {of // 2 for shape in SHAPES for of in shape}
    counts |= {rows // consumers // 2 for rows, consumers in LATENT_ROWS}
    return [
        function(
            f"wait_{pending}_{count}", f"all products but the last {pending} are done",
            uncovered(f"wgmma.wait_group.sync.aligned {pending};"), changed=["float"] * count,
        )
        for pending in (0, 1) for count in sorted(counts)
    ]  # fmt: skip


def others() -> list[str]:
    """Short functions, of a few instructions each."""
    wait = [
        "{",
        ".reg .pred p;",
        "again:",
        "mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;",
        "@!p bra again;",
        "}",
    ]
    functions = [
        function(f"address_{name}", f"where {name} lies", uncovered(f"ld.param.u64 $0, [arguments+{at}];"),
                 made=["i64"], pure=True)
        for name, at in (("q", 8), ("k", 24), ("v", 40), ("k_scale", 88), ("v_scale", 104), ("out", 120))
    ]  # fmt: skip
    functions += [
        function("copy_16", "16 bytes to shared memory are under way; `size` of them are read, the others are 0",
                 ["cp.async.cg.shared.global [$0], [$1], 16, $2;"], inputs=["i32", "i64", "i32"]),
        function("read_number_2", "a number of 2 bytes is under way",
                 ["{", ".reg .b16 h;", "ld.global.u16 h, [$1];", "cvt.u32.u16 $0, h;", "}"], made=["i32"],
                 inputs=["i64"]),
        function("read_number_4", "one of 4", ["ld.global.u32 $0, [$1];"], made=["i32"], inputs=["i64"]),
        function("copies_wait", "all copies are done", ["cp.async.wait_all;"]),
        function("copies_close", "the copies before are a group", ["cp.async.commit_group;"]),
        *(function(f"copies_left_{pending}", f"all groups of copies but the last {pending} are done",
                   [f"cp.async.wait_group {pending};"]) for pending in (1, 3)),
        function("copies_arrive", "an arrival, when the copies before are done",
                 uncovered("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];"), inputs=["i32"]),
        function("for_products", "products see what is in shared memory for this thread",
                 uncovered("fence.proxy.async.shared::cta;")),
        function("barrier_make", "a barrier of so many arrivals",
                 uncovered("mbarrier.init.shared::cta.b64 [$0], $1;"), inputs=["i32", "i32"]),
        function("barrier_end", "its memory is free", uncovered("mbarrier.inval.shared::cta.b64 [$0];"),
                 inputs=["i32"]),
        function("barrier_arrive", "an arrival", uncovered("mbarrier.arrive.shared::cta.b64 _, [$0];"), inputs=["i32"]),
        function("barrier_wait", "all arrivals of the phase of this parity are there", uncovered(*wait),
                 inputs=["i32", "i32"]),
        function("meet", "so many threads come to barrier n of the block", ["bar.sync $0, $1;"], inputs=["i32", "i32"]),
        function("warp_meets", "all lanes of a warp see what each of them has written", ["bar.warp.sync -1;"]),
        function("let_pass", "the same, of which this one does not wait", ["bar.arrive $0, $1;"],
                 inputs=["i32", "i32"]),
        *(function(f"registers_{more}_{count}", f"a thread of this warpgroup has {count} registers",
                   uncovered(f"setmaxnreg.{more}.sync.aligned.u32 {count};"))
          for more, count in dict.fromkeys(
              pair for _, _, first, producer, consumer in REGISTERS
              for pair in (("dec", producer), ("inc", consumer), ("inc", first), ("dec", first))
          )),
        function("meet_and_vote", "the same, and whether one of them says so",
                 ["{", ".reg .pred p;", "setp.ne.u32 p, $3, 0;", "bar.red.or.pred p, $1, $2, p;",
                  "selp.u32 $0, 1, 0, p;", "}"], made=["i32"], inputs=["i32"] * 3),
        function("write_turned", "four matrices of 8 x 8 halves to shared memory, transposed; a lane has a row's place",
                 uncovered("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};"),
                 inputs=["i32"] * 5),
        function("read_16", "16 bytes of shared memory", ["ld.shared.v4.u32 {$0, $1, $2, $3}, [$4];"],
                 made=["i32"] * 4, inputs=["i32"]),
        function("write_16", "16 bytes to shared memory", ["st.shared.v4.u32 [$0], {$1, $2, $3, $4};"],
                 inputs=["i32"] * 5),
        function("read_4", "4 bytes of shared memory", ["ld.shared.u32 $0, [$1];"], made=["i32"], inputs=["i32"]),
        function("read_words", "two words of it", ["ld.shared.v2.u32 {$0, $1}, [$2];"], made=["i32"] * 2,
                 inputs=["i32"]),
        function("write_4", "4 bytes to shared memory", ["st.shared.u32 [$0], $1;"], inputs=["i32"] * 2),
        function("product_less", "x * y - z, rounded once, also where `launch.cuda.ptx` keeps products and sums apart",
                 ["{", ".reg .f32 n;", "neg.f32 n, $3;", "fma.rn.f32 $0, $1, $2, n;", "}"], made=["float"],
                 inputs=["float"] * 3, pure=True),
        function("exp2_flushed", "2 ** x as `exp2` has it, also where subnormals are kept",
                 ["ex2.approx.ftz.f32 $0, $1;"], made=["float"], inputs=["float"], pure=True),
        function("bits_from", "all bits from number n on", ["{", ".reg .s32 n;", "max.s32 n, $1, 0;",
                 "shl.b32 $0, -1, n;", "}"], made=["i32"], inputs=["i32"], pure=True),
    ]  # fmt: skip
    return functions


def copies(width: int, keys: int) -> str:
    """Copies of 16 rows in pieces of 16 bytes: 8 lanes share a row, and a lane has rows n, 4 + n, 8 + n and 12 + n.

    One function starts all four. Otherwise the assembler would use the registers of one address again for the next, and
    wait for them.
    """
    panels = width // 64
    lines = [
        f"cp.async.cg.shared.global [${row % 2}+{row // 2 * 8 * PANEL + panel * keys * PANEL}], "
        f"[${2 + row}+{panel * PANEL}], 16;"
        for row in range(4)
        for panel in range(panels)
    ]
    comment = "pieces of 4 rows to shared memory are under way: places of the first two of them, where the rows' lie"
    return function(f"copy_rows_{width}", comment, lines, inputs=[*["i32"] * 2, *["i64"] * 4])


def conversions() -> dict[str, tuple[int, int, tuple[int, ...], list[str]]]:
    """How eight codes become h0 to h3, pairs of halves of float16 in the order of their columns, exactly.

    For each kind of codes: the number of words that hold them, from $1 on; the number of constants after those; how
    many numbers a group may have; the lines. A code without a sign is put into the lowest bits of the half 1,024, where
    it counts 1 or 16, and 1,024 is then subtracted.
    """
    magic, all_four = "0x64006400", range(4)  # 1,024, twice

    def bytes_of(other: str, *selections: str) -> list[str]:
        return [f"prmt.b32 h{n}, ${1 + n // 2}, {other}, {selections[n % 2]};" for n in all_four]

    def of_nibbles(mask: str) -> list[str]:
        return [f"lop3.b32 h{n}, h{n}, {mask}, {magic}, 0xEA;" for n in all_four]

    def plus(less: str) -> list[str]:
        return [f"add.rn.f16x2 h{n}, h{n}, {less};" for n in all_four]

    def times(factor: str, less: str) -> list[str]:
        return [f"fma.rn.f16x2 h{n}, h{n}, {factor}, {less};" for n in all_four]

    e4m3 = []
    for n in range(2):
        e4m3 += [f"mov.b32 {{l, h}}, ${1 + n};", f"cvt.rn.f16x2.e4m3x2 h{2 * n}, l;"]
        e4m3.append(f"cvt.rn.f16x2.e4m3x2 h{2 * n + 1}, h;")
    spread = [f"prmt.b32 h{n}, $1, 0, 0x{n}{n}{n}{n};" for n in all_four]
    of_pairs = bytes_of("0", "0x1100", "0x3322")
    return {
        "bytes": (2, 1, (1, 2), [*bytes_of(magic, "0x5150", "0x5352"), *plus("$3")]),
        "e4m3": (2, 0, (0, 1), e4m3),
        "e5m2": (2, 0, (0, 1), bytes_of("0", "0x1404", "0x3424")),  # the upper halves of halves
        "nibbles": (1, 2, (2,), [*spread, *of_nibbles("0x00F0000F"), *times("$2", "$3")]),
        "low_nibbles": (2, 1, (1,), [*of_pairs, *of_nibbles("0x000F000F"), *plus("$3")]),
        "high_nibbles": (2, 2, (1,), [*of_pairs, *of_nibbles("0x00F000F0"), *times("$3", "$4")]),
    }


def multiplied(by: str, count: int, first: int) -> list[str]:
    """Lines that multiply h0 to h3 by a scale, $`first`, and add a bias, the operand after it, if there are any.

    They compute in halves, or in floats that are rounded once to halves of a kind. A pair is two numbers of a row in
    one register: a scale and its bias, or the scales of two groups, of which the next operand selects the lane's.
    """
    scale, bias, lines = f"${first}", f"${first + 1}", []
    if by == "pairs":
        lines = [f"prmt.b32 s, {scale}, 0, {bias};"]
        if count == 2:
            lines = [f"mov.b32 {{l, h}}, {scale};", "mov.b32 s, {l, l};", "mov.b32 b, {h, h};"]
        scale, bias, by = "s", "b", "halves"
    for n in range(4):
        if by == "halves":
            lines += ([], [f"mul.rn.f16x2 h{n}, h{n}, {scale};"], [f"fma.rn.f16x2 h{n}, h{n}, {scale}, {bias};"])[count]
            continue
        lines += [f"mov.b32 {{l, h}}, h{n};", "cvt.f32.f16 x, l;", "cvt.f32.f16 y, h;"]
        for f in "xy":
            lines += ([], [f"mul.f32 {f}, {f}, {scale};"], [f"fma.rn.f32 {f}, {f}, {scale}, {bias};"])[count]
        lines.append(f"cvt.rn.{by}x2.f32 h{n}, y, x;")
    return lines


def writes() -> list[str]:
    """Functions that convert eight codes to numbers of a row in shared memory; see `conversions` and `multiplied`."""
    functions = []
    for kind, (words, constants, counts, lines) in conversions().items():
        for by, count in itertools.product(("halves", "pairs", *HALVES), counts):
            if count == 0 and by in ("pairs", "f16"):
                continue
            behind = 1 + words + constants
            head = ["{", ".reg .b32 h0, h1, h2, h3, s, b;", ".reg .b16 l, h;", ".reg .f32 x, y;"]
            tail = ["st.shared.v4.u32 [$0], {h0, h1, h2, h3};", "}"]
            text = [*head, *lines, *multiplied(by, count, behind), *tail]
            numbers = {"halves": ["i32"] * count, "pairs": ["i32"] * (3 - count)}.get(by, ["float"] * count)
            inputs = ["i32"] * behind + numbers
            functions.append(function(f"write_{kind}_{by}_{count}", f"eight numbers of {kind}, multiplied as {by}",
                                      uncovered(*text), inputs=inputs))  # fmt: skip
    return functions


def stores(width: int) -> list[str]:
    """Stores of the two columns of every eight that a lane has of a row: halves in a register, or floats.

    One instruction stores both if their address is a multiple of their size; otherwise `apart` stores them one by one.
    """
    pairs = width // 8
    halves, floats = [], []
    for n in range(pairs):
        halves += [
            f"mov.b32 {{x, y}}, ${n + 1};",
            f"st.global.b16 [$0+{16 * n}], x;",
            f"st.global.b16 [$0+{16 * n + 2}], y;",
        ]
        floats += [f"st.global.f32 [$0+{32 * n + 4 * i}], ${2 * n + i + 1};" for i in range(2)]
    at = "at an address and at every 8 columns behind it"
    return [
        function(f"store_halves_{width}", f"pairs of halves {at}",
                 [f"st.global.b32 [$0+{16 * n}], ${n + 1};" for n in range(pairs)], inputs=["i64", *["i32"] * pairs]),
        function(f"store_halves_apart_{width}", "the same, one half at a time",
                 ["{", ".reg .b16 x, y;", *halves, "}"], inputs=["i64", *["i32"] * pairs]),
        function(f"store_floats_{width}", f"pairs of floats {at}",
                 [f"st.global.v2.f32 [$0+{32 * n}], {{${2 * n + 1}, ${2 * n + 2}}};" for n in range(pairs)],
                 inputs=["i64", *["float"] * 2 * pairs]),
        function(f"store_floats_apart_{width}", "the same, one float at a time", floats,
                 inputs=["i64", *["float"] * 2 * pairs]),
    ]  # fmt: skip


def text() -> str:
    """The whole file."""
    products = [make(half, *shape) for half in HALVES for shape in SHAPES for make in (scores, values)]
    products += [scores_of_codes(kind, *shape) for kind in SUMS for shape in SHAPES]
    products += [values_of_codes("e4m3", *shape) for shape in SHAPES]
    results = [each for width, _ in SHAPES for each in stores(width)]
    latents = [make(half, *row) for half in HALVES for row in LATENT_ROWS for make in (latent_scores, latent_values)]
    batches = [copies(width, keys) for width, keys in (*SHAPES, (LATENT[0], LATENT[2])) if width % 64 == 0]
    of_latents = [*latents, *latent_results()]
    short = [*others(), *for_codes(), *waits()]
    return "\n".join([HEAD, *short, *batches, *writes(), *products, *of_latents, *results])


if __name__ == "__main__":
    print(text(), end="")
