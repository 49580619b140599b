"""Which engine compiles and runs the kernels, who chooses it, and what is said where it cannot be had."""

import platform

import numpy as np
import pytest

import tikv
from tikv import engines, runtime

pytestmark = pytest.mark.thorough

OPERATION = "tikv.copy(np.ones((1, 1, 4), np.float32), np.zeros((1, 2, 4), np.float32), position=0)"
TAICHI = "Install taichi>=1.7.4,<1.8 on CPython 3.10-3.13."
QUADRANTS = (
    'Install taichi-kv[quadrants] (pip install "taichi-kv[quadrants]"; in a clone pip install -e ".[quadrants]"), '
    "which needs quadrants>=1.4,<1.5, on CPython 3.12-3.14."
)


def used_and_other():
    """The engine of this run, and the one that it might have had."""
    used = runtime.engine_in_use()
    (other,) = set(engines.ALL.values()) - {used}
    return used, other


@pytest.fixture
def python(python, tmp_path):
    """Run a script in a process of its own, where these versions of engines seem to be installed and none is named."""

    def run(script, environment=None, **versions):
        for name, version in versions.items():
            (folder := tmp_path / f"{name}-{version}.dist-info").mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        before = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport numpy as np, tikv\n"
        return python(before + script, **{"TIKV_ENGINE": "", **(environment or {})}).stdout

    return run


# what is wrong: environment, versions, a script before the call, the call, the error's kind and its whole message
REFUSED = {
    "unknown": (
        {}, {}, "", "tikv.init(engine='taichy')", "OptionError",
        "init: engine='taichy' is not an engine. Use auto, taichi or quadrants.",
    ),
    "unknown in the environment": (
        {"TIKV_ENGINE": "taichy"}, {}, "", OPERATION, "OptionError",
        "runtime: TIKV_ENGINE=taichy is not an engine. Use auto, taichi or quadrants.",
    ),
    "of another kind": (
        {}, {}, "", "tikv.init(engine=3)", "OptionError",
        "init: engine=3 is not an engine. Use auto, taichi or quadrants.",
    ),
    "Taichi is missing": (
        {}, {}, "sys.modules['taichi'] = None", "tikv.init(engine='taichi')", "ArchError",
        "runtime: Taichi cannot be imported (import of taichi halted; None in sys.modules). " + TAICHI,
    ),
    "Quadrants is missing": (
        {"TIKV_ENGINE": "quadrants"}, {"quadrants": "1.4.0"}, "sys.modules['quadrants'] = None", OPERATION, "ArchError",
        "runtime: Quadrants cannot be imported (import of quadrants halted; None in sys.modules). " + QUADRANTS,
    ),
    "Taichi is too old": (
        {}, {"taichi": "1.7.3"}, "", "tikv.init(engine='taichi')", "ArchError",
        "runtime: Taichi 1.7.3 is too old. " + TAICHI,
    ),
    "Taichi is too new": (
        {"TIKV_ENGINE": "taichi"}, {"taichi": "1.8.0rc1"}, "", OPERATION, "ArchError",
        "runtime: Taichi 1.8.0rc1 is newer than what this version of tikv was tested with. " + TAICHI,
    ),
    "Quadrants is too old": (
        {"TIKV_ENGINE": "quadrants"}, {"quadrants": "1.3.3"}, "", "tikv.init()", "ArchError",
        "runtime: Quadrants 1.3.3 is too old. " + QUADRANTS,
    ),
    "an arch that it lacks": (
        {}, {}, "", "tikv.init('amdgpu', engine='taichi')", "ArchError",
        "init: Taichi has no arch amdgpu, but Quadrants has. Use engine='quadrants' in another process. " + QUADRANTS,
    ),
    "an arch that it would lack if it were installed": (
        {}, {}, "sys.modules['taichi'] = None", "tikv.init('amdgpu', engine='taichi')", "ArchError",
        "init: Taichi has no arch amdgpu, but Quadrants has. Use engine='quadrants' in another process. " + QUADRANTS,
    ),
    "Quadrants is too new": (
        {}, {"quadrants": "1.10"}, "", "tikv.init(engine='quadrants')", "ArchError",
        "runtime: Quadrants 1.10 is newer than what this version of tikv was tested with. " + QUADRANTS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_choice_that_cannot_be_had(python, what):
    """Says what to install, by init and by the first operation; nothing is settled by it."""
    environment, versions, before, call, kind, message = REFUSED[what]
    said = python(
        f"{before}\n"
        "for _ in range(2):\n"
        "    try:\n"
        f"        {call}\n"
        f"    except tikv.{kind} as error:\n"
        "        assert isinstance(error, tikv.TikvError)\n"
        "        print(error)\n",
        environment,
        **versions,
    )
    assert said.splitlines() == [message, message]


def test_after_a_refusal_another_engine_may_be_chosen(python):
    name, other = (engine.name for engine in used_and_other())
    said = python(
        f"sys.modules[{other!r}] = None\n"
        f"try: tikv.init('cpu', engine={other!r})\n"
        f"except tikv.ArchError: print(tikv.init('cpu', engine={name!r}).engine.name, tikv.info()['engine_why'])\n"
    )
    assert said == f"{name} asked for\n"


def test_a_process_has_one_engine(python):
    """A second choice is refused, and what runs goes on running."""
    used, other = used_and_other()
    name = used.name
    said = python(
        f"live = tikv.init('cpu', engine={name!r})\n"
        f"try: tikv.init('cpu', engine={other.name!r})\n"
        "except tikv.ArchError as error: print(error)\n"
        "assert live.alive and live.epoch == 1\n"
        f"{OPERATION}\n"
        f"assert tikv.init('cpu', engine={name!r}).epoch == 2 and tikv.init('cpu', engine='auto').epoch == 3\n"
    )
    assert said == (
        f"init: this process uses {used.title} (asked for), and a process has one engine. Choose {other.title} in "
        f"another process, before its first operation: tikv.init(engine={other.name!r}), or "
        f"TIKV_ENGINE={other.name}.\n"
    )


def test_an_array_of_the_other_engine_is_refused(arch):
    used, other = used_and_other()
    kind = type("ScalarNdarray", (), {"__module__": f"{other.name}.lang._ndarray"})
    with pytest.raises(tikv.ArchError) as caught:
        tikv.copy(kind(), np.zeros((1, 2, 4), np.float32), position=0)
    assert str(caught.value) == (
        f"copy: src is a ScalarNdarray of {other.title}, and this process uses {used.title}. Call "
        f"tikv.init(engine={other.name!r}) before the first operation, or pass a copy: src.to_numpy()."
    )


def test_it_is_named(python):
    """By `info`, before and after the start, with the reason; the environment yields to what a call asks for."""
    name, other = (engine.name for engine in used_and_other())
    told = "print(tikv.info()['engine'], tikv.info()['engine_why'], sep=': ')\n"
    start = "tikv.init('cpu')\n"
    assert python(told + start + told, {"TIKV_ENGINE": name}) == f"{name}: TIKV_ENGINE names it\n" * 2
    said = python(told + f"tikv.init('cpu', engine={name!r})\n" + told, {"TIKV_ENGINE": "auto"})
    assert said.splitlines()[-1] == f"{name}: asked for"
    said = python(f"tikv.init('cpu', engine={name!r})\n" + told, {"TIKV_ENGINE": other})
    assert said == f"{name}: asked for\n"
    assert python(f"import {name}\n" + told, {"ENABLE_TAICHI_HEADER_PRINT": "0"}).splitlines()[-1] == (
        f"{name}: it is imported already"
    )


def test_what_is_wrong_is_named_too(python):
    """`info` raises nothing."""
    told = "print(tikv.info()['engine'], tikv.info()['engine_why'], tikv.info()['launcher']['why'], sep='|')\n"
    assert python(told, {"TIKV_ENGINE": "taichi"}, taichi="1.6.0") == (
        f"none|Taichi 1.6.0 is too old. {TAICHI}|Taichi has not started\n"
    )
    assert python(told, {"TIKV_ENGINE": "x"}) == (
        "none|runtime: TIKV_ENGINE=x is not an engine. Use auto, taichi or quadrants.|the engine has not started\n"
    )


INSTALLED = [
    (["taichi", "quadrants"], [], [], False, ("taichi", "it is installed")),
    (["taichi"], [], [], False, ("taichi", "it is installed")),
    (["quadrants"], [], [], False, ("quadrants", "Taichi is not installed")),
    ([], [], [], False, ("taichi", "the default")),
    ([], [], [], True, ("quadrants", "there is no Taichi for this Python and machine")),
    (["taichi", "quadrants"], ["quadrants"], [], False, ("quadrants", "it is imported already")),
    (["taichi", "quadrants"], ["taichi", "quadrants"], ["quadrants"], False, ("quadrants", "it runs already")),
    (["taichi", "quadrants"], ["taichi", "quadrants"], [], False, ("taichi", "it is installed")),
]


@pytest.mark.parametrize(("installed", "imported", "running", "without_taichi", "expected"), INSTALLED)
def test_the_choice_where_nobody_names_one(monkeypatch, installed, imported, running, without_taichi, expected):
    """An engine that runs, one that is imported, Taichi, Quadrants."""
    for engine in engines.ALL.values():
        facts = {
            "version": lambda self: "1" if self.name in installed else None,
            "is_imported": property(lambda self: self.name in imported),
            "program": property(lambda self: self if self.name in running else None),
        }
        for name, fact in facts.items():
            monkeypatch.setattr(type(engine), name, fact)
    monkeypatch.setattr(engines, "_has_no_taichi", lambda: without_taichi)
    engine, why = engines.selected_by_itself()
    assert (engine.name, why) == expected


@pytest.mark.parametrize(
    ("python_version", "machine", "system", "without"),
    [
        ((3, 13), "x86_64", "linux", False),
        ((3, 14), "x86_64", "linux", True),
        ((3, 12), "aarch64", "linux", True),
        ((3, 12), "arm64", "darwin", False),
        ((3, 14), "arm64", "darwin", True),
        ((3, 12), "AMD64", "win32", False),
    ],
)
def test_where_there_is_no_taichi(monkeypatch, python_version, machine, system, without):
    monkeypatch.setattr(engines.sys, "version_info", python_version)
    monkeypatch.setattr(engines.sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert engines._has_no_taichi() is without


@pytest.mark.parametrize("engine", engines.ALL.values(), ids=lambda engine: engine.name)
def test_the_versions_that_were_tried(engine):
    for version in {"taichi": ("1.7.4", "1.7.9", "1.7.4.post1"), "quadrants": ("1.4.0", "1.4.12")}[engine.name]:
        assert engine.why_refused(version) is None
    for version in {"taichi": ("1.7.3", "1.6", "0.9.1"), "quadrants": ("1.3.9", "1", "0")}[engine.name]:
        assert engine.why_refused(version) == f"{engine.title} {version} is too old"
    for version in {"taichi": ("1.8", "1.10.0", "2"), "quadrants": ("1.5.0b1", "1.5", "2.0")}[engine.name]:
        assert "is newer than what" in engine.why_refused(version)
