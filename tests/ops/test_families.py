"""The families of attention kernels: their order, why a family does not serve a form, and the page that lists them.

`python tests/ops/test_families.py` writes the table of `docs/support.md` again.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
import re

import numpy as np
import pytest
from ops.test_kernel_choice import MACHINES, Machine, Recorder, call_of, form_of, on, table

import tikv
from tikv import arrays
from tikv.errors import TikvError
from tikv.ops.attention import families
from tikv.ops.attention.families import Form, explain, that_need_native
from tikv.ops.attention.families.cpu import Cpu, CpuInOrder
from tikv.ops.attention.families.warpgroups import WarpgroupCodes, WarpgroupLatents, WarpgroupPrompts

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "support.md"
STYLES = {"CPU": "cpu", "Vulkan, Metal": "spirv", "CUDA": "cuda"}
SHOWN = re.compile(r"(?<=<!-- families of attention kernels -->\n).*?(?=<!-- end of families -->)", re.DOTALL)


def rows_of_page() -> str:
    """The families in their order, as rows of a table."""
    rows = ["| back end | kernels | serve |", "| --- | --- | --- |"]
    for title, style in STYLES.items():
        rows += [f"| {title} | {family.title} | {family.serves} |" for family in families.families_of(style)]
    return "\n".join([*rows, ""])


@pytest.mark.archs("cpu")
def test_the_page_lists_the_families_in_their_order(arch):
    assert SHOWN.findall(PAGE.read_text(encoding="utf-8")) == [rows_of_page()], "run this file as a program"


def forms_of(machine: str):
    """Some of the recorded forms for a machine that are not refused, each with the family that it gets."""
    rows = [row for row in table() if row.startswith(f"{machine}\t")]
    for row in rows[::5]:
        recorded = form_of(row)
        live = Machine(machine, recorded["invariant"])
        if recorded["kind"] != "channels":
            with on(live, Recorder(), [0]), contextlib.suppress(TikvError):
                call, _ = call_of(live, recorded)
                yield Form(live, call.arrays, call.plan.query, call.plan.cache, call.plan.options), call.plan.family


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("machine", MACHINES)
def test_the_reasons_are_those_of_the_families_before_the_one_that_serves(arch, machine):
    number = 0
    for form, family in forms_of(machine):
        order = families.families_of(form.live.kernel_style)
        before = order[: order.index(type(family))]
        with on(form.live, Recorder(), [0]):
            first, *reasons = explain(form).split("; ")
            assert first == f"by {family.title}"
            assert reasons == [f"not by {each.title}: {each.why_not(form)}" for each in before]
        assert all(each.why_not(form) for each in before)
        number += 1
    assert number > 20


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("machine", MACHINES)
def test_what_the_page_says_of_a_family_holds(arch, machine):
    for form, family in forms_of(machine):
        assert not form.live.invariant or "without `invariant=True`" not in family.serves
        assert not form.why_not_terms or "no sink logits, slopes, masks or trees" not in family.serves


@pytest.mark.archs("cpu")
def test_a_kernel_that_the_native_launcher_refuses_is_a_reason(arch):
    form = next(form for form, family in forms_of("cuda 9") if family.title == "warpgroups over prompts")
    with on(form.live, Recorder(), [0]):
        assert explain(form).startswith("by warpgroups over prompts; not by warpgroups over latents: the values are")
        reason = "not by warpgroups over prompts: the native launcher does not launch their kernel"
        assert reason in explain(form, {WarpgroupPrompts})
        assert that_need_native(form) == {WarpgroupLatents, WarpgroupCodes, WarpgroupPrompts}


@pytest.fixture
def order(no_plans, monkeypatch):
    """A function that says which families there are, whatever the first of the library are now."""
    return lambda *listed: monkeypatch.setattr(families, "families_of", lambda style: listed)


@pytest.mark.archs("cpu")
def test_a_plan_logs_its_kernels_and_why_those_before_them_do_not_serve(order, caplog):
    order(CpuInOrder, Cpu)
    q, k = np.ones((1, 2, 7), np.float32), np.ones((1, 1, 5, 7), np.float32)
    tikv.decode_attention(q, k, k, 5)
    assert not [record for record in caplog.records if "attention by" in record.message]
    arrays.runtime_of().plans.clear()
    with caplog.at_level(logging.DEBUG, logger="tikv"):
        tikv.decode_attention(q, k, k, 5)
        tikv.decode_attention(q, k, k, 5)
    (message,) = [record.message for record in caplog.records if "attention by" in record.message]
    assert message.startswith("decode_attention: attention by threads of the CPU; ")
    assert "not by threads of the CPU in a fixed order: tikv.init(invariant=True) is not set" in message


class Narrow(Cpu):
    """A toy: rows of a single column, by the kernels of `Cpu`, one query row at a time."""

    title = "toy loops"
    serves = "heads of one column"

    @classmethod
    def why_not(cls, form: Form) -> str:
        return super().why_not(form) or ("" if form.cache.width == form.cache.width_v == 1 else form.widths)

    def rows_of_task(self, most: int, fixed: int = 0) -> int:
        return 1


@pytest.mark.archs("cpu")
def test_a_new_family_is_a_class_and_a_place_in_the_order(order, rng, caplog):
    """Public calls get it for the forms that it serves, and other forms get the families after it, with its reason."""
    order(Narrow, CpuInOrder, Cpu)
    with caplog.at_level(logging.DEBUG, logger="tikv"):
        for width in (1, 2):
            q, k, v = (rng.standard_normal((1, heads, 5, width)).astype(np.float32) for heads in (4, 2, 2))
            result = tikv.decode_attention(q[:, :, 0], k, v, 5, scale=1.0)
            for head in range(4):
                expected, _ = tikv.reference.attention(q[0, head, 0], k[0, head // 2], v[0, head // 2], scale=1.0)
                np.testing.assert_allclose(result[0, head], expected, rtol=1e-5)
    messages = [record.message for record in caplog.records if "attention by" in record.message]
    assert messages[0] == "decode_attention: attention by toy loops"
    assert messages[1].startswith("decode_attention: attention by threads of the CPU; not by toy loops: heads are 2")


if __name__ == "__main__":
    PAGE.write_text(SHOWN.sub(lambda _: rows_of_page(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
