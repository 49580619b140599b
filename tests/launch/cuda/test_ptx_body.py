"""The body of a long loop goes back into its entry. `data/long.ptx` is what Taichi 1.7.4 generates, cut to one sum."""

import pathlib
import re
import shutil
import subprocess

import pytest

from tikv.launch.cuda import ptx
from tikv.launch.cuda.ptx_body import inlined

LONG = (pathlib.Path(__file__).parent / "data" / "long.ptx").read_text()
ARGUMENT_BYTES = 32


def test_the_function_is_gone_and_its_instructions_are_the_loops():
    found = inlined(LONG)
    assert not re.search(r"\.func|call|local|function_body", found)
    main = found.split(".visible .entry")[2]
    before = re.findall(r"\t(?:add|setp|mul|st)\..*;", LONG.split(".func")[2])
    kept = [line for line in re.findall(r"\t(?:add|setp|mul|st)\..*;", main) if "%loop" not in line]
    assert kept == before
    assert "\tmov.u32 \t%r1, %loop4;" in main
    assert main.index("$loop_item:") < main.index("$L__BB2_2:") < main.index("bra \t$loop_next;")
    assert main.count("ret;") == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_its_arguments_are_read_from_the_parameter(overlap, tmp_path):
    patched = ptx.patch(LONG, ARGUMENT_BYTES, overlap, shared=True)
    assert re.findall(r"ld\.param\.(\w+) \t(%\w+), \[arguments\+(\d+)\]", patched.text) == [
        ("u32", "%loop0", "0"), ("u32", "%r2", "24"), ("u64", "%rd4", "8"),
    ]  # fmt: skip
    assert patched.block == 512
    assert "param_0" not in patched.text
    assembler = shutil.which("ptxas")
    if assembler is None:
        pytest.skip("no ptxas here")
    (tmp_path / "kernel.ptx").write_text(patched.text)
    subprocess.run([assembler, "-arch=sm_90", "kernel.ptx", "-o", "kernel.cubin"], cwd=tmp_path, check=True)


OTHER_FORMS = {
    "an item that is not the loop's": lambda t: t.replace("[param2+0], %r11", "[param2+0], %r8"),
    "a second call": lambda t: t.replace("\t} // callseq 36\n", "\t} // callseq 36\n\tst.local.u32 \t[%rd2], %r11;\n"),
    "a runtime that the function uses": lambda t: t.replace("\tret;\n   ", "\tld.u64 \t%rd6, [%rd1+8];\n\tret;\n   "),
    "its second parameter": lambda t: t.replace(
        "\tld.u64 \t%rd2, [%rd1];", "\tld.u64 \t%rd2, [function_body_param_1];"
    ),
    "another function": lambda t: t + ".func other()\n{\n\tret;\n}\n",
}


@pytest.mark.parametrize("change", OTHER_FORMS)
def test_an_unknown_form_is_refused(change):
    changed = OTHER_FORMS[change](LONG)
    assert changed != LONG
    with pytest.raises(ptx.Unpatchable):
        ptx.patch(changed, ARGUMENT_BYTES, shared=True)


def test_kernels_without_shared_memory_of_the_launch_stay_as_they_are():
    with pytest.raises(ptx.Unpatchable, match="calls into"):
        ptx.patch(LONG, ARGUMENT_BYTES)
