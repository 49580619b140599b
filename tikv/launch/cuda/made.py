"""Kernels made beforehand: a file for each compute capability, in which PTX is looked up before anything is compiled.

`tikv kernels build` writes the files, `sm_90.zip` for compute capability 9.0. They are in the package's folder `made`,
which a wheel contains if they were built before it, or in the folders that ``TIKV_KERNELS_DIR`` names. No file is
opened before a kernel is looked up.

Quadrants launches these kernels natively too; to know whether a file serves the GPU, it is opened before the first one.
"""

from __future__ import annotations

import functools
import io
import json
import os
import pathlib
import re
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tikv import runtime
from tikv.errors import ArchError
from tikv.launch.cuda import keys

VARIABLE = "TIKV_KERNELS_DIR"
PACKAGE_FOLDER = pathlib.Path(__file__).parent / "made"
FORM = 1  # of a file; another number is not read
_NAME = re.compile(r"sm_(\d+)(\d)\.zip")
_MANIFEST = "manifest.json"
_SUFFIX = ".ptx"


class NotMade(ArchError):
    """No file has a kernel, and the engine cannot compile it for the native launcher."""


class MadeFile(NamedTuple):
    """What is in a file: who made it from which sources, and the keys of its kernels; or why it is not used."""

    path: pathlib.Path
    capability: tuple[int, int]
    manifest: Mapping[str, Any]
    kernels: frozenset[str]
    refusal: str = ""
    archive: zipfile.ZipFile | None = None


def folders() -> list[pathlib.Path]:
    """Where files are looked for: in the folders that TIKV_KERNELS_DIR names, then in the package's.

    If the variable is set, but empty, no kernel made beforehand is used.
    """
    named = os.environ.get(VARIABLE)
    if named == "":
        return []
    return [*(pathlib.Path(part) for part in (named or "").split(os.pathsep) if part), PACKAGE_FOLDER]


def paths_in(folder: pathlib.Path) -> dict[tuple[int, int], pathlib.Path]:
    """The files in a folder by compute capability, the newest capability first."""
    try:
        names = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    except OSError:
        return {}
    return dict(sorted(((_capability(path), path) for path in names), reverse=True))


def files_for(target: str) -> Iterator[MadeFile]:
    """The files that serve a GPU such as "sm_89", in the order in which kernels are looked up.

    Files for an older GPU serve a newer one, since PTX does. A file that is damaged or of another version is not used,
    and a warning says so once.
    """
    newest = _capability(pathlib.Path(f"{target}.zip"))
    for folder in folders():
        for capability, path in paths_in(folder).items():
            if capability > newest:
                continue
            file = contents(path)
            if file.refusal:
                _warn_once(path, file.refusal)
            else:
                yield file


def has(key: str, target: str) -> bool:
    """Whether a file that serves a GPU has a kernel, by its `keys.made_key_of`."""
    return any(key in file.kernels for file in files_for(target))


def read(key: str, target: str) -> str | None:
    """The PTX of a kernel for a GPU, by its `keys.made_key_of`; None if it was not made beforehand."""
    for file in files_for(target):
        if file.archive is not None and key in file.kernels:
            try:
                return file.archive.read(key + _SUFFIX).decode()
            except Exception as error:  # of zipfile, or of any of its decompressors
                _warn_once(file.path, f"it is damaged ({error})")
    return None


def contents(path: pathlib.Path) -> MadeFile:
    """What is in a file. It is opened once, and again after it has changed; its list of kernels takes 20 ms to read."""
    try:
        status = path.stat()
    except OSError as error:
        return MadeFile(path, _capability(path), {}, frozenset(), f"it cannot be read ({error})")
    return _contents(path, status.st_mtime_ns, status.st_size, keys.sources(), os.getpid())


@functools.lru_cache(16)  # by the process too: one that was forked would share the place in an open file
def _contents(path: pathlib.Path, time_ns: int, size: int, sources: str, process: int) -> MadeFile:
    capability = _capability(path)
    try:
        archive = zipfile.ZipFile(path)
        manifest = json.loads(archive.read(_MANIFEST))
        names = archive.namelist()
        made = frozenset(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))
        form, digest, version = manifest["form"], manifest["sources"], manifest["tikv"]
    except Exception as error:  # whatever these bytes make of a reader
        return MadeFile(path, capability, {}, frozenset(), f"it is damaged ({error})")
    refusal = ""
    if form != FORM or digest != sources:
        refusal = f"tikv {version} made it from other sources of kernels than this version's"
    return MadeFile(path, capability, manifest, made, refusal, archive)


def packed(capability: tuple[int, int], texts: Mapping[str, str], facts: Mapping[str, Any]) -> bytes:
    """The bytes of a file: PTX by `keys.made_key_of`, and facts, of which "tikv" is the version that made it."""
    manifest = {
        "form": FORM,
        "sources": keys.sources(),
        "capability": ".".join(map(str, capability)),
        **facts,
    }
    data = io.BytesIO()
    with zipfile.ZipFile(
        data, "w", zipfile.ZIP_LZMA
    ) as archive:  # a third smaller than deflated; a kernel is read in 2 ms
        for name, text in ((_MANIFEST, json.dumps(manifest, indent=1)), *sorted(texts.items())):
            # An entry's time stays that of the format's beginning, so that the same kernels are the same bytes.
            entry = zipfile.ZipInfo(name if name == _MANIFEST else name + _SUFFIX)
            archive.writestr(entry, text, zipfile.ZIP_LZMA)
    return data.getvalue()


def report() -> str:
    """One sentence about the files that this process would use, for `tikv info`."""
    files = [contents(path) for folder in folders() for path in paths_in(folder).values()]
    if not files:
        return "not found; kernels are compiled when they are first needed"
    return "; ".join(
        f"{file.path}: " + (f"not used, {file.refusal}" if file.refusal else f"{len(file.kernels):,} kernels")
        for file in files
    )


_warned: set[pathlib.Path] = set()


def _warn_once(path: pathlib.Path, why: str) -> None:
    if path not in _warned:
        _warned.add(path)
        runtime.log.warning(
            "the kernels made beforehand in %s are not used, and kernels are compiled instead: %s. Make the file again "
            "with `tikv kernels build`, or remove it.",
            path, why,
        )  # fmt: skip


def _capability(path: pathlib.Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2])) if match else (0, 0)
