"""Which launcher kernels get: the one asked for by name, or the first that works; and the reports about it."""

from __future__ import annotations

import os
from typing import Any

from tikv import extras, runtime
from tikv.errors import ArchError
from tikv.launch.cuda import driver, made

LAUNCHERS = ("native", "direct", "public")
_selected: str | None = None
# Why the driver cannot be used for a GPU, by the engine and the GPU; checked once per process.
_unavailable: dict[tuple[str, int], ArchError | None] = {}

# Kernels that the native launcher refused, and why, for as long as the process lives: the reason does not go away, and
# a second attempt would start the compiling process again.
fallbacks: dict[str, str] = {}


def choose_launcher(name: str | None) -> None:
    """Use this launcher for kernels that are bound from now on; None uses the first that works.

    Calls that were bound before keep theirs. On CPU, Vulkan and Metal "native" means "direct".

    Raises:
        ArchError: there is no such launcher.
    """
    global _selected
    if name is not None and name not in LAUNCHERS:
        raise ArchError(f"launch: unknown launcher {name!r}. Use one of {', '.join(LAUNCHERS)}.")
    _selected = name


def launcher_setting() -> str | None:
    """The launcher asked for by name, if any."""
    name = _selected or os.environ.get("TIKV_LAUNCHER") or None
    if name is not None and name not in LAUNCHERS:
        raise ArchError(
            f"launch: TIKV_LAUNCHER={name} is not a launcher. Use one of {', '.join(LAUNCHERS)}, or unset it."
        )
    return name


def launcher_of(live: runtime.Runtime) -> tuple[str, str]:
    """(launcher, why) for kernels bound now in a runtime.

    Raises:
        ArchError: native was asked for on CUDA, but cannot be used.
    """
    setting = launcher_setting()
    if setting == "public":
        return setting, "asked for"
    if not live.is_cuda:
        return "direct", f"the cheapest on {live.arch}"
    if setting == "direct":
        return setting, "asked for"
    key, title = (live.engine.name, live.index), live.engine.title
    if key not in _unavailable:
        _unavailable[key] = _refusal(live)
    unavailable = _unavailable[key]
    if unavailable is None and live.invariant and not live.engine.has_known_ptx:
        unavailable = ArchError(
            f"tikv.init(invariant=True) is set, and kernels that {title} compiles may give other bits than those made "
            "beforehand. Use engine='taichi', or unset TIKV_LAUNCHER."
        )
    if unavailable is None:
        why = "cuda-bindings is installed and the driver answers"
        if not live.engine.has_known_ptx:
            why = f"for kernels made beforehand; {title} launches the others"
        return "native", "asked for" if setting else why
    if setting:
        raise ArchError(f"launch: the native launcher was asked for but is not available: {unavailable}") from None
    return "direct", str(unavailable)


def _refusal(live: runtime.Runtime) -> ArchError | None:
    """Why the driver cannot launch kernels on a runtime's GPU; None if it can."""
    needs_files, title = not live.engine.has_known_ptx, live.engine.title
    no_file = ArchError(
        f"the native launcher cannot load what {title} compiles, and no file of kernels made beforehand serves this "
        "GPU. Make one with `tikv kernels build` where Taichi is installed, or use engine='taichi'."
    )
    if needs_files and not any(map(made.paths_in, made.folders())):
        return no_file
    try:
        device = driver.device(live.index)
    except ArchError as error:
        return error
    return no_file if needs_files and not any(made.files_for(device.target)) else None


def require_native(live: runtime.Runtime, operation: str) -> None:
    """Require the native launcher on GPUs other than the first, since the engine knows only one GPU.

    Raises:
        ArchError: the runtime is on such a GPU, and kernels have another launcher there.
    """
    if not live.index:
        return
    name, why = launcher_of(live)
    if name == "native":
        return
    raise ArchError(
        f"{operation}: {live.device} needs the native launcher, and the launcher in use is {name!r} ({why}); "
        f"{live.engine.title}'s own launcher uses cuda:0 alone. {extras.install('cuda')}, or start a process that "
        f"sees {live.device} alone (set CUDA_VISIBLE_DEVICES)."
    )


def launcher_report(live: runtime.Runtime) -> dict[str, Any]:
    """Which launcher kernels of a runtime get, why, and which kernels it could not take.

    Examples:
        >>> import tikv
        >>> tikv.launch.launcher_report(tikv.init(arch="cpu"))["launcher"]
        'direct'
    """
    try:
        name, why = launcher_of(live)
    except ArchError as error:
        name, why = "none", str(error)
    return {"launcher": name, "why": why, "fallbacks": dict(fallbacks) if live.is_cuda else {}}


def multiprocessors(live: runtime.Runtime) -> int:
    """The number of multiprocessors of the GPU that a runtime on CUDA uses, whichever launcher is chosen.

    Raises:
        ArchError: the driver does not say.
    """
    assert live.is_cuda, "only a CUDA device can be asked for its number of multiprocessors"
    return driver.multiprocessors(live.index)


def why_no_tensor_cores(live: runtime.Runtime) -> str:
    """Why a runtime's kernels cannot use tensor cores; empty if they can.

    With an engine that cannot link bitcode they can if they were made beforehand, so binding one may be refused.
    """
    if not live.is_cuda:
        return f"they exist on NVIDIA GPUs alone, and this is {live.arch}"
    if not live.engine.has_bitcode and (reason := why_not_native(live)):
        return f"{live.engine.title} cannot link bitcode, and {reason}"
    try:
        generation = driver.generation(live.index)
    except ArchError as error:
        return str(error)
    if generation < 8:
        return f"the GPU is of compute capability {generation}, and they need at least 8"
    from tikv.kernels.attention.sm80.instructions import BITCODE

    return "" if BITCODE.is_file() else f"{BITCODE} is missing"


def why_no_bitcode(live: runtime.Runtime) -> str:
    """Why a runtime's engine cannot compile kernels that call functions of LLVM bitcode; empty if it can."""
    return "" if live.engine.has_bitcode else f"{live.engine.title} cannot link bitcode"


def why_no_hopper(live: runtime.Runtime) -> str:
    """Why a runtime's kernels cannot use what only compute capability 9.0 has; empty if they can."""
    if reason := why_no_tensor_cores(live):
        return reason
    generation = driver.generation(live.index)
    if generation != 9:
        return f"the GPU is of compute capability {generation}, and they need 9"
    return why_not_native(live)


def why_not_native(live: runtime.Runtime) -> str:
    """Why a runtime's kernels do not have the native launcher; empty if they do."""
    try:
        name, why = launcher_of(live)
    except ArchError as error:
        return str(error)
    if name == "native":
        return ""
    return f"kernels are launched by {name!r} ({why.rstrip('.')}), and they need the native launcher"


def why_no_warpgroups(live: runtime.Runtime) -> str:
    """Why a runtime's kernels cannot use products of warpgroups, for prompts and latents; empty if they can."""
    if reason := why_no_hopper(live):
        return reason
    from tikv.kernels.attention.sm90.attend import BITCODE

    return "" if BITCODE.is_file() else f"{BITCODE} is missing"
