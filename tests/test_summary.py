"""What pytest says at the end of a run of these tests."""

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
