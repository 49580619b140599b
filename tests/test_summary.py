"""What a run of these tests leaves out, and what pytest says of it at the end."""

from types import SimpleNamespace


def test_what_was_left_out_is_one_line(pytestconfig):
    left_out = pytestconfig.pluginmanager.get_plugin(str(pytestconfig.rootpath / "conftest.py"))._left_out

    def skipped(*reasons):
        return [SimpleNamespace(longrepr=("a file", 1, f"Skipped: {reason}")) for reason in reasons]

    assert left_out([]) == ""
    assert left_out(skipped("left for --full", "no torch", "left for --full")) == (
        "left out: 3 (2 left for --full, 1 no torch); -rs lists them"
    )
    assert left_out(skipped(*"aabbccdde")) == "left out: 9 (2 a, 2 b, 2 c, and 2 more reasons); -rs lists them"


def test_a_case_without_a_new_value_is_left_for_a_thorough_run(pytestconfig):
    has_new_value = pytestconfig.pluginmanager.get_plugin(str(pytestconfig.rootpath / "conftest.py"))._has_new_value
    parent = SimpleNamespace(nodeid="tests/test_summary.py")

    def case(name, **params):
        return SimpleNamespace(parent=parent, originalname=name, name=name, callspec=SimpleNamespace(params=params))

    values = [("f16", 8), ("f32", 16), ("f16", 16), ("f16", 32)]
    cases = [case("test_a", dtype=dtype, width=width) for dtype, width in values]
    cases += [case("test_b", dtype="f16", width=16)] * 2
    seen: dict = {}
    assert [has_new_value(each, "cpu", seen) for each in cases] == [True, True, False, True, True, False]
    assert has_new_value(cases[2], "vulkan", seen)
