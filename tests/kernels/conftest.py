"""What the tests of Metal's source share: the programs they need, and each group of kernels compiled once."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import metal_source
import pytest
from metal_on_cpu import library

from tikv import runtime


def require(missing, packages):
    """Skip where something is missing, but fail in CI."""
    if missing:
        reason = f"no {', '.join(missing)} here (Debian: {packages})"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def clang(tmp_path_factory):
    """The folder of what clang compiled in this run of the tests."""
    require([library.CLANG] if shutil.which(library.CLANG) is None else [], "clang")
    return tmp_path_factory.mktemp("metal_on_cpu")


@pytest.fixture(scope="session")
def compiler():
    """The environment of a process that compiles C++ with Vulkan's headers."""
    environment = {"CXX": os.environ.get("CXX", "c++")}
    command = [*environment["CXX"].split(), *os.environ.get("CXXFLAGS", "").split(), "-x", "c++", "-fsyntax-only", "-"]
    try:
        tried = subprocess.run(command, input="#include <vulkan/vulkan.h>", capture_output=True, text=True, timeout=60)
        works = tried.returncode == 0
    except OSError:
        works = False
    require([] if works else ["C++ compiler with Vulkan's headers"], "g++, libvulkan-dev")
    return environment


@pytest.fixture(scope="session")
def vulkan(request):
    """The environment of a process that compiles for Metal: SPIR-V's programs and a Vulkan driver are here."""
    engine = runtime.engine_in_use()
    if importlib.util.find_spec(f"{engine.name}.aot") is None:
        pytest.skip(f"{engine.title} does not save compiled kernels, of which Metal's source is made")
    missing = [tool for tool in ("spirv-val", "spirv-dis", "spirv-cross") if shutil.which(tool) is None]
    probe = "from tikv.runtime import vulkan_devices; assert vulkan_devices()"
    root = request.config.rootpath
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (root, root / "tests")))}
    child = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, env=environment, timeout=120)
    if child.returncode:
        assert child.stderr.rstrip().endswith("AssertionError"), child.stderr  # the probe itself failed
        missing.append("a Vulkan driver")
    require(missing, "spirv-tools, spirv-cross, mesa-vulkan-drivers, libvulkan1")
    return environment


@pytest.fixture(scope="session")
def made(vulkan, tmp_path_factory):
    """A function of a group's name: the folder of its SPIR-V and its kernels.

    They are compiled once, in another process, for all processes of pytest-xdist.
    """
    fcntl = pytest.importorskip("fcntl", reason="locks of files are those of Unix")
    here = tmp_path_factory.getbasetemp()
    shared = here.parent if "PYTEST_XDIST_WORKER" in os.environ else here

    def made(group):
        folder = shared / f"metal-{group}"
        found = folder / "kernels.json"  # which is written last
        with open(shared / f"metal-{group}.lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not found.exists():
                child = subprocess.run(
                    [sys.executable, metal_source.__file__, folder, group],
                    capture_output=True, text=True, env=vulkan, timeout=600,
                )  # fmt: skip
                assert child.returncode == 0, child.stderr[-3000:]
        return folder, json.loads(found.read_text(encoding="utf-8"))

    return made
