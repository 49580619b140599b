"""The machine and the versions that a bench ran on, in a line above each of its tables."""

import datetime
import os
import pathlib
import platform
import subprocess

from tikv import runtime

PACKAGES = ("taichi", "quadrants", "numpy", "ml_dtypes", "torch", "transformers")
ROOT = pathlib.Path(__file__).resolve().parent.parent


def environment(archs) -> dict:
    """The devices of these back ends, cores, the machine's load, versions, commit and date."""
    return {
        "devices": {arch: runtime.device_name(arch) for arch in archs},
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: runtime.version_of(name) for name in PACKAGES},
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def line(about: dict, archs=None) -> str:
    """The same as one line, without what is unknown; `archs`: only the devices of these."""
    parts = [device for arch, device in about["devices"].items() if archs is None or arch in archs]
    known = (("cores", "{} cores"), ("load", "load {} before"), ("system", "{}"), ("python", "Python {}"))
    parts += [text.format(about[name]) for name, text in known if about.get(name) is not None]
    parts += [f"{name} {version}" for name, version in about["versions"].items() if version]
    return f"{', '.join(parts)}; {about['date']}" + (f", commit {about['commit']}" if "commit" in about else "")


def commit() -> str:
    """The commit of the sources, and whether they were changed since."""
    command = ["git", "describe", "--always", "--dirty=, changed", "--exclude=*"]
    child = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    return child.stdout.strip() or "unknown"
