"""PTX rewritten, without a GPU. `data/*.ptx` are what Taichi 1.7.4 generates for two copies."""

import pathlib
import re
import shutil
import subprocess

import pytest

from tikv.launch.cuda import peepholes, ptx

DATA = pathlib.Path(__file__).parent / "data"
NAMES = ("copy", "cast")
ARGUMENT_BYTES = 232


def recorded(name):
    return (DATA / f"{name}.ptx").read_text()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_read_from_the_parameter(name, overlap):
    text = recorded(name)
    patched = ptx.patch(text, ARGUMENT_BYTES, overlap)
    assert text.count(".entry") == 2
    assert re.findall(r"\.entry (\w+)\(", patched.text) == [patched.entry]
    assert re.findall(r"\.param .*", patched.text) == [f".param .align 16 .b8 arguments[{ARGUMENT_BYTES}]"]
    assert patched.block == 128
    assert "_param_0" not in patched.text
    assert "cvta" not in patched.text
    read = [(kind, int(at)) for kind, at in re.findall(r"ld\.param\.(\w+) \t%\w+, \[arguments\+(\d+)\]", patched.text)]
    arrays = 4 if name == "copy" else 2
    assert {at for kind, at in read if kind == "u64"} == {8 + 16 * i for i in range(arrays)}
    assert read[0] == ("u32", 0), "the loop's bound is the first array's extent"
    before = set(re.findall(r"ld\.global\.\w+ \t%\w+, \[%rd2\+(\d+)\]", text))
    assert {str(at) for _, at in read} == before | {"0"}


@pytest.mark.parametrize("name", NAMES)
def test_words_are_moved_whole(name):
    text, patched = recorded(name), ptx.patch(recorded(name), ARGUMENT_BYTES).text
    halves = re.findall(r"\t(?:ld|st)\.[ubf]32 \t", text.split("range_for(")[1])
    words = re.findall(r"\t(?:ld|st)\.global\.v2\.b32 \t", patched)
    assert len(words) * 2 == len(halves) - 1, "all but the loop's bound"
    assert not re.search(r"\t(?:ld|st)\.[ubf]32 \t", patched)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_rewritten_text_assembles(name, overlap, tmp_path):
    assembler = shutil.which("ptxas")
    if assembler is None:
        pytest.skip("no ptxas here")
    (tmp_path / "kernel.ptx").write_text(ptx.patch(recorded(name), ARGUMENT_BYTES, overlap).text)
    subprocess.run([assembler, "-arch=sm_90", "kernel.ptx", "-o", "kernel.cubin"], cwd=tmp_path, check=True)


def test_a_kernel_waits_before_it_touches_memory():
    patched = ptx.patch(recorded("copy"), ARGUMENT_BYTES, overlap=True).text
    assert ".version 7.8" in patched
    assert ".target sm_90" in patched
    instructions = [line.strip() for line in patched.splitlines() if re.match(r"\t[a-z@]", line)]
    assert instructions[:2] == ["griddepcontrol.launch_dependents;", "griddepcontrol.wait;"]
    assert patched.count("griddepcontrol") == 2


SERIAL_STORE = "\tst.u32 \t[%rd5], %r1;\n"
REFUSED = {
    "a third entry": lambda t: t + t[t.index(".visible") : t.index("}") + 2].replace("_0_serial", "_2_serial"),
    "a runtime function": lambda t: t.replace(".visible", ".extern .func taichi_printf();\n.visible", 1),
    "shared memory of no size": lambda t: t.replace(".visible", ".extern .shared .align 8 .b8 s[];\n.visible", 1),
    "a first entry that does more": lambda t: t.replace(SERIAL_STORE, SERIAL_STORE + "\tst.u32 \t[%rd5+4], %r1;\n"),
    "the bound put elsewhere": lambda t: t.replace("+32872", "+32880", 1),
    "the arguments' address kept": lambda t: t.replace(
        "\tmov.b32 \t%f1", "\tadd.s64 \t%rd46, %rd2, %rd9;\n\tmov.b32 \t%f1"
    ),
    "the runtime used": lambda t: t.replace("\tld.param.u64 \t%rd7, [%rd1];", "\tld.param.u64 \t%rd7, [%rd1+8];"),
    "another parameter": lambda t: t.replace("_param_0[32]", "_param_0[40]"),
    "no fixed block": lambda t: t.replace(".maxntid 128, 1, 1", ""),
    "two axes of threads": lambda t: t.replace(".maxntid 128, 1, 1", ".maxntid 64, 2, 1"),
    "arguments out of bounds": lambda t: t.replace("[%rd2+160]", f"[%rd2+{ARGUMENT_BYTES}]"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_an_unknown_form_is_refused(change):
    text = recorded("cast")
    changed = REFUSED[change](text)
    assert changed != text
    with pytest.raises(ptx.Unpatchable):
        ptx.patch(changed, ARGUMENT_BYTES)


def test_shared_arrays_get_their_room():
    text = recorded("copy").replace(".visible", ".extern .shared .align 8 .b8 shared_array_1[512];\n.visible", 1)
    assert "\n.shared .align 8 .b8 shared_array_1[512];\n" in ptx.patch(text, ARGUMENT_BYTES).text


def test_shared_memory_of_the_launch_has_no_size():
    line = ".extern .shared .align 1024 .b8 hopper_shared[];\n"
    text = recorded("copy").replace(".visible", line + ".visible", 1)
    assert line in ptx.patch(text, ARGUMENT_BYTES, shared=True).text
    with pytest.raises(ptx.Unpatchable):
        ptx.patch(text.replace(line, line + ".extern .func taichi_printf();\n"), ARGUMENT_BYTES, shared=True)


@pytest.mark.parametrize("overlap", [False, True])
def test_instructions_of_one_gpu_alone_are_uncovered_for_it(overlap, tmp_path):
    """Taichi's text has them as comments, since Taichi loads it for an older one."""
    covered = "\t//!wgmma.fence.sync.aligned;\n\t//!wgmma.commit_group.sync.aligned;\n\tret;"
    text = recorded("copy")
    last = text.rindex("\tret;")
    patched = ptx.patch(text[:last] + covered + text[last + len("\tret;") :], ARGUMENT_BYTES, overlap).text
    assert "\twgmma.fence.sync.aligned;\n" in patched
    assert ".target sm_90a" in patched
    assert "//!" not in patched
    assert ".target sm_90a" not in ptx.patch(text, ARGUMENT_BYTES, overlap).text


def test_strict_arithmetic_rounds_each_step():
    body = """{
\tfma.rn.ftz.f32 \t%f1, %f2, %f3, 0f3F800000;
\tmul.ftz.f32 \t%f4, %f1, %f2;
\tadd.f64 \t%fd1, %fd2, %fd3;
\tcvt.ftz.f32.f16 \t%f5, %h1;
\trsqrt.approx.ftz.f32 \t%f6, %f5;
\tdiv.full.ftz.f32 \t%f7, %f6, %f5;
\tsetp.lt.ftz.f32 \t%p1, %f6, %f5;
\tadd.s32 \t%r1, %r2, %r3;
}"""
    assert ptx._strict(body).split("\n") == [
        "{",
        "\t.reg .f32 \t%exact32;",
        "\tmul.rn.f32 \t%exact32, %f2, %f3;",
        "\tadd.rn.f32 \t%f1, %exact32, 0f3F800000;",
        "\tmul.rn.f32 \t%f4, %f1, %f2;",
        "\tadd.rn.f64 \t%fd1, %fd2, %fd3;",
        "\tcvt.f32.f16 \t%f5, %h1;",
        "\tsqrt.rn.f32 \t%exact32, %f5;",
        "\trcp.rn.f32 \t%f6, %exact32;",
        "\tdiv.rn.f32 \t%f7, %f6, %f5;",
        "\tsetp.lt.f32 \t%p1, %f6, %f5;",
        "\tadd.s32 \t%r1, %r2, %r3;",
        "}",
    ]


def test_an_address_further_into_the_arguments_is_followed():
    text = recorded("cast").replace(
        "\tmov.b32 \t%f1,", "\tadd.s64 \t%rd99, %rd2, 120;\n\tld.global.u64 \t%rd98, [%rd99+8];\n\tmov.b32 \t%f1,"
    )
    patched = ptx.patch(text, ARGUMENT_BYTES).text
    assert "\tld.param.u64 \t%rd98, [arguments+128];" in patched
    assert "%rd99" not in patched


WORD = """{
\tld.param.u64 \t%rd1, [arguments+8];
\tmul.wide.s32 \t%rd2, %r1, 8;
\tadd.s64 \t%rd3, %rd1, %rd2;
\tld.u32 \t%rd4, [%rd3];
BETWEEN\tld.u32 \t%rd5, [%rd3+4];
}"""


def test_halves_are_joined():
    joined = peepholes.whole_words(WORD.replace("BETWEEN", ""))
    assert "\tld.global.v2.b32 \t{%half0, %half1}, [%rd3+0];" in joined
    assert joined.count("ld.") == 2


ELEMENT = "{\n\tshr.u64 \t%rd2, %rd1, 32;\nBETWEEN\tcvt.u16.u64 \t%rs1, %rd2;\n"


def test_elements_are_parts_of_registers():
    taken = peepholes.quarters(ELEMENT.replace("BETWEEN", ""))
    assert "{%quarter0, %quarter1, %quarter2, %quarter3}, %rd1;\n\tmov.b16 \t%rs1, %quarter2;" in taken
    assert "cvt" not in taken
    assert ".reg .b16 \t%quarter<4>;" in taken


@pytest.mark.parametrize(
    "between",
    ["\tmov.u64 \t%rd1, %rd7;\n", "\tadd.s64 \t%rd2, %rd2, 1;\n", "$L__BB0_3:\n", "\t@%p1 bra \t$L__BB0_4;\n"],
    ids=["the word changes", "the shifted word changes", "a label", "a branch"],
)
def test_elements_of_words_that_may_have_changed_are_left(between):
    text = ELEMENT.replace("BETWEEN", between)
    assert peepholes.quarters(text) == text


@pytest.mark.parametrize(
    "text",
    [
        WORD.replace("BETWEEN", "").replace("%r1, 8;", "%r1, 4;"),
        WORD.replace("BETWEEN", "").replace("ld.param.u64 \t%rd1, [arguments+8]", "mov.u64 \t%rd1, %rd9"),
        WORD.replace("BETWEEN", "").replace("[%rd3+4]", "[%rd3+8]"),
        WORD.replace("BETWEEN", "")
        .replace("[%rd3]", "[%rd3+4]")
        .replace("ld.u32 \t%rd5, [%rd3+4]", "ld.u32 \t%rd5, [%rd3+8]"),
        WORD.replace("BETWEEN", "\tst.u32 \t[%rd3+4], %r7;\n"),
        WORD.replace("BETWEEN", "$L__BB0_1:\n"),
        WORD.replace("BETWEEN", "\tbar.sync \t0;\n"),
        WORD.replace("BETWEEN", "\tadd.s64 \t%rd6, %rd5, 1;\n"),
        WORD.replace("BETWEEN", "\tadd.s64 \t%rd3, %rd3, 8;\n"),
    ],
    ids=["not words", "not an array", "other words", "across words", "store", "label", "barrier", "used", "moved on"],
)
def test_halves_that_may_not_be_joined_are_left(text):
    assert peepholes.whole_words(text) == text


PAIR = """{
\tmov.u32 \t%r1, %tid.x;
\tadd.s32 \t%r2, %r1, 1;
\tmul.wide.s32 \t%rd1, %r1, 8;
\tmul.wide.s32 \t%rd2, %r2, 8;
MEET\tld.param.u64 \t%rd3, [arguments+8];
\tadd.s64 \t%rd4, %rd3, %rd1;
\tld.global.v2.b32 \t{%half0, %half1}, [%rd4+0];
\tmov.b32 \t%r3, %half0;
\tmov.b32 \t%r4, %half1;
BETWEEN\tadd.s64 \t%rd5, %rd3, %rd2;
\tld.global.v2.b32 \t{%half0, %half1}, [%rd5+0];
\tmov.b32 \t%r5, %half0;
\tmov.b32 \t%r6, %half1;
}"""


@pytest.mark.parametrize("meet", ["", "$L__BB0_1:\n"], ids=["", "indices from before paths meet"])
def test_words_side_by_side_are_read_as_one(meet):
    text = peepholes.pairs(PAIR.replace("MEET", meet).replace("BETWEEN", ""))
    assert "\tadd.s64 \t%rd5, %rd4, 8;" in text
    assert text.count("ld.global") == 1
    assert "ld.global.v4.b32 \t{%quad0, %quad1, %quad2, %quad3}, [%rd4+0];\n\tmov.b32 \t%half0, %quad0;" in text
    assert "\tmov.b32 \t%half0, %quad2;\n\tmov.b32 \t%half1, %quad3;\n\tmov.b32 \t%r5, %half0;" in text
    assert ".reg .b32 \t%quad<4>;" in text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("BETWEEN", "\tst.global.u32 \t[%rd4+8], %r7;\n"),
        ("BETWEEN", "\tbar.sync \t0;\n"),
        ("BETWEEN", "$L__BB0_1:\n"),
        ("BETWEEN", "\t@%p1 bra \t$L__BB0_4;\n"),
        ("%r1, 1;", "%r1, 2;"),
        ("%r1, 1;", "%r1, -1;"),
        ("%r1, 1;", "%r9, 1;"),
        ("%rd2, %r2, 8;", "%rd2, %r2, 4;"),
        ("%rd5, %rd3, %rd2", "%rd5, %rd8, %rd2"),
        ("%rd1, %r1, 8;\n", "%rd1, %r1, 8;\n\tmov.u32 \t%r1, %r8;\n"),
    ],
    ids=["store", "barrier", "label", "branch", "further on", "before", "other index", "other size", "other array",
         "index moved on"],
)  # fmt: skip
def test_words_that_may_not_be_read_as_one_are_left(old, new):
    text = peepholes.pairs(PAIR.replace(old, new).replace("MEET", "").replace("BETWEEN", ""))
    assert text.count("ld.global.v2") == 2


def test_of_three_words_in_a_row_the_first_two_are_one():
    third = PAIR.replace("BETWEEN", "").replace("MEET", "\tmul.wide.s32 \t%rd6, %r7, 8;\n")
    third = third.replace("{\n", "{\n\tadd.s32 \t%r7, %r2, 1;\n", 1)
    third = (
        third.removesuffix("}") + "\tadd.s64 \t%rd7, %rd3, %rd6;\n\tld.global.v2.b32 \t{%half0, %half1}, [%rd7+0];\n}"
    )
    text = peepholes.pairs(third)
    assert (text.count("ld.global.v4"), text.count("ld.global.v2")) == (1, 1)
    assert "\tadd.s64 \t%rd7, %rd4, 16;" in text


def test_a_copy_of_the_address_of_the_arguments_is_that_address():
    """LLVM makes one where a loop reads the address anew, for the path around the loop."""
    text = recorded("copy")
    read = re.search(r"\tld\.param\.u64 \t(%rd\d+), \[%rd\d+\];\n\tcvta\.to\.global\.u64 \t(%rd\d+), \1;\n", text)
    (pointer, base), at = read.groups(), read.end()
    rest = text[at:].replace(f"[{base}+", "[%rd900+", 1)
    assert rest != text[at:]
    again = f"\tcvta.to.global.u64 \t%rd900, {pointer};\n"
    copied = ptx.patch(f"{text[:at]}\tmov.u64 \t%rd900, {base};\n{again}{rest}", ARGUMENT_BYTES)
    assert copied == ptx.patch(text, ARGUMENT_BYTES)
    with pytest.raises(ptx.Unpatchable, match="another way"):
        ptx.patch(f"{text[:at]}\tmov.u64 \t%rd900, %rd901;\n{again}{rest}", ARGUMENT_BYTES)
