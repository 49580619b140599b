"""A plugin of pytest: the project's own tests on Metal, without a Mac.

PYTHONPATH=tests/kernels pytest -p metal_on_cpu.plugin --arch metal tests/ops

Each kernel is compiled when it is first launched. `--metal` has the `Options` as JSON, for instance
`--metal '{"simd_width": 16, "seed": 1, "fast_math": true, "flush": true}'`.
"""

import json
import pathlib
import tempfile

import pytest

from metal_on_cpu.library import Options

_folder = pytest.StashKey[tempfile.TemporaryDirectory]()
_back_end = pytest.StashKey()


def pytest_addoption(parser):
    parser.addoption("--metal", metavar="JSON", default="{}", help="Options of metal_on_cpu with which kernels run")


class AfterConftest:
    """Starts nothing before conftest.py has set where Taichi keeps compiled kernels."""

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config):
        from metal_on_cpu import back_end

        config.stash[_folder] = tempfile.TemporaryDirectory(prefix="tikv-metal-")
        options = Options(**json.loads(config.getoption("--metal")))
        config.stash[_back_end] = back_end.BackEnd(options, pathlib.Path(config.stash[_folder].name))
        back_end.install(config.stash[_back_end], "vulkan")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    # conftest.py would look for Metal in another process.
    (conftest,) = (plugin for plugin in config.pluginmanager.get_plugins() if hasattr(plugin, "_why_absent"))
    why_absent = conftest._why_absent
    conftest._why_absent = lambda arch: None if arch == "metal" else why_absent(arch)
    config.pluginmanager.register(AfterConftest())


def pytest_unconfigure(config):
    if _folder in config.stash:
        config.stash[_folder].cleanup()


def pytest_terminal_summary(terminalreporter, config):
    here = config.stash[_back_end]
    terminalreporter.section("Metal on the CPU")
    terminalreporter.line(f"{here.options}: {len(here.launched)} kernels, {sum(here.launched.values())} launches")
