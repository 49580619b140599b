"""What the tests of Metal's source share: the programs they need, and each group of kernels compiled once."""

import os
import shutil

import pytest
from metal_on_cpu import library


def require(missing, packages):
    """Skip where something is missing, but fail in CI."""
    if missing:
        reason = f"no {', '.join(missing)} here (Debian: {', '.join(packages)})"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def clang(tmp_path_factory):
    """The folder of what clang compiled in this session."""
    require([library.CLANG] if shutil.which(library.CLANG) is None else [], ["clang"])
    return tmp_path_factory.mktemp("metal_on_cpu")
