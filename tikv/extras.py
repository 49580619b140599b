"""Optional packages, and the extra to install if one of them is missing."""

from __future__ import annotations

import importlib
import re
from typing import Any

from tikv.errors import MissingPackageError

# For each package, the extra of pyproject.toml that installs it.
EXTRAS = {
    "cuda": "cuda",
    "matplotlib": "plot",
    "quadrants": "quadrants",
    "resvg_py": "plot",
    "rich": "cli",
    "torch": "torch",
    "transformers": "transformers",
}

LEAST = {"torch": (2, 5), "transformers": (4, 56)}  # the oldest supported versions


def need(module: str, what: str) -> Any:
    """Import a module of a package that may be missing; `what` needs it.

    Raises:
        MissingPackageError: it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(what, error) from None


def require_version(module: Any) -> None:
    """Check that an imported package is not older than this library supports.

    Raises:
        ImportError: it is older; `missing` takes this error.
    """
    name = module.__name__
    if tuple(int(part) for part in re.findall(r"\d+", module.__version__)[:2]) < LEAST[name]:
        least = ".".join(map(str, LEAST[name]))
        raise ImportError(f"{module.__version__} is older than {least}", name=name)


def missing(what: str, error: ImportError, extra: str = "") -> MissingPackageError:
    """The error to raise instead of an ImportError; `extra` is the extra that installs all that `what` needs."""
    package = (error.name or "a package").partition(".")[0]
    if isinstance(error, ModuleNotFoundError):
        fault = "is not installed"
    else:
        fault = f"cannot be used ({(str(error).strip() or 'without a reason').splitlines()[0]})"
    extra = extra or EXTRAS.get(package, "")
    failure = MissingPackageError(f"{what} needs {package}, which {fault}. {install(extra) if extra else INSTALL}.")
    failure.name = package
    return failure


INSTALL = "Install taichi-kv with all that it needs (pip install taichi-kv; in a clone pip install -e .)"


def install(extra: str) -> str:
    """How to install an extra, from the package index and from a clone; a sentence without its full stop."""
    return f'Install taichi-kv[{extra}] (pip install "taichi-kv[{extra}]"; in a clone pip install -e ".[{extra}]")'
