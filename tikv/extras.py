"""Packages that this library can do without, and what to install where one of them is missing: its extras."""

from __future__ import annotations

import importlib
import re
from typing import Any

from tikv.errors import MissingPackageError

# By the package, the extra of pyproject.toml that brings it.
EXTRAS = {
    "cuda": "cuda",
    "matplotlib": "plot",
    "quadrants": "quadrants",
    "rich": "cli",
    "torch": "torch",
    "transformers": "transformers",
}

LEAST = {"torch": (2, 4), "transformers": (4, 56)}  # versions


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
    """A package that was imported is not older than what this library can work with.

    Raises:
        ImportError: it is, for `missing`.
    """
    name = module.__name__
    if tuple(int(part) for part in re.findall(r"\d+", module.__version__)[:2]) < LEAST[name]:
        least = ".".join(map(str, LEAST[name]))
        raise ImportError(f"{module.__version__} is older than {least}", name=name)


def missing(what: str, error: ImportError, extra: str = "") -> MissingPackageError:
    """What to raise in the place of an ImportError; `extra` is the one that brings all that `what` needs."""
    package = (error.name or "a package").partition(".")[0]
    if isinstance(error, ModuleNotFoundError):
        fault = "is not installed"
    else:
        fault = f"cannot be used ({(str(error).strip() or 'without a reason').splitlines()[0]})"
    extra = extra or EXTRAS.get(package, "")
    found = MissingPackageError(f"{what} needs {package}, which {fault}. {install(extra) if extra else INSTALL}.")
    found.name = package
    return found


INSTALL = "Install taichi-kv with all that it needs (pip install taichi-kv; in a clone pip install -e .)"


def install(extra: str) -> str:
    """How to install an extra, from the index of packages and from a clone; a sentence without its end."""
    return f'Install taichi-kv[{extra}] (pip install "taichi-kv[{extra}]"; in a clone pip install -e ".[{extra}]")'
