"""Whether the kernels of a runtime may reduce over the subgroups of its device, and why not.

The engine emits the operations without declaring their SPIR-V capability, so a driver may give wrong numbers, refuse
the kernel, or end the process. They are tried once per process: in this process if they have run with the driver
before, otherwise in a process of their own, which a driver may end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np

from tikv import runtime
from tikv.errors import OptionError
from tikv.launch.compiled import kernel
from tikv.runtime.cache import BoundedCache

CHOICES = ("auto", "on", "off")  # values of TIKV_SUBGROUPS: "on" uses them without a trial
NOT_TRIED = "not tried yet: attention's first call tries them"
SECONDS = 60.0  # the most that a trial in a process of its own may take
WRONG = "a trial gave wrong numbers"

_RIGHT, _ENDED = "subgroups: right", "subgroups: wrong"
_TRIAL = f"""
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import tikv
from tikv.launch import subgroups
print({_RIGHT!r} if subgroups.gives_right_numbers(tikv.init(sys.argv[2])) else {_ENDED!r})
"""

_reasons: BoundedCache[tuple[str, str], str] = BoundedCache()  # the result of a trial, by engine and arch


def why_no_subgroups(live: runtime.Runtime) -> str:
    """Why kernels of a runtime do not reduce over subgroups; empty if they do. The first call may take seconds.

    Raises:
        OptionError: TIKV_SUBGROUPS is not one of `CHOICES`.
    """
    if live.why_no_subgroups is None:
        with live.lock:
            live.why_no_subgroups = _why_not(live)
    return live.why_no_subgroups


def subgroup_report(live: runtime.Runtime) -> str:
    """Text for people: "in use", why not, or that they were not tried yet. Tries nothing."""
    if live.why_no_subgroups is None:
        return NOT_TRIED
    return live.why_no_subgroups or "in use"


def _why_not(live: runtime.Runtime) -> str:
    setting = os.environ.get("TIKV_SUBGROUPS") or "auto"
    if setting not in CHOICES:
        raise OptionError(
            f"attention: TIKV_SUBGROUPS={setting} is not a choice. Use one of {', '.join(CHOICES)}, or unset it."
        )
    if setting == "off":
        return "TIKV_SUBGROUPS is off"
    # Every Mac's GPU that the engines run on reduces over its SIMD groups; a Vulkan driver says whether it does.
    if live.arch == "vulkan" and not runtime.vulkan_subgroups():
        return "the driver does not report them"
    if setting == "on":
        return ""
    key = live.engine.name, live.arch
    why = _reasons.get(key)
    if why is None:
        why = _reasons.keep(key, tried(live))
        if why:
            runtime.log.warning("attention on %s does not use subgroup operations: %s", live.arch, why)
    return why


def tried(live: runtime.Runtime) -> str:
    """What is wrong with the operations here; empty if they give the right numbers.

    What Apple's compiler, or a Vulkan driver with which they have not run, does to a process is not known beforehand.
    """
    if live.arch == "vulkan" and runtime.vulkan_drivers_known():
        return "" if gives_right_numbers(live) else WRONG
    return _tried_apart(live)


def gives_right_numbers(live: runtime.Runtime) -> bool:
    """Whether a kernel that uses each of the operations gives the right numbers."""
    from tikv.kernels import lanes

    trial = kernel(live, lanes.make_self_test, lanes.SUBGROUP)
    results = np.zeros(lanes.SELF_TEST_ROWS * lanes.BLOCK, np.float32)
    with live.lock, live.compiling(trial.fast_math):
        trial.function(results)
    right: bool = lanes.self_test_passed(results)
    return right


def _tried_apart(live: runtime.Runtime) -> str:
    """`tried`, in a process of its own with the same engine and arch."""
    if getattr(sys, "frozen", False) or not sys.executable:
        return "no Python executable to try them out in a separate process; TIKV_SUBGROUPS=on uses them untested"
    path = json.dumps([os.path.abspath(p or os.curdir) for p in sys.path])
    try:
        child = subprocess.run(
            [sys.executable, "-c", _TRIAL, path, live.arch],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            check=False,
            env={**os.environ, "TIKV_ENGINE": live.engine.name, **live.engine.quiet},
        )
    except subprocess.TimeoutExpired:
        return f"a trial in a separate process gave no answer within {SECONDS:g} s"
    except OSError as error:
        return f"a process to try them out could not be started ({error})"
    said = child.stdout.decode(errors="replace").split("\n")
    if _RIGHT in said:
        return ""
    if _ENDED in said:
        return WRONG
    lines = child.stderr.decode(errors="replace").strip().splitlines()
    last = f" ({lines[-1].strip()})" if lines else ""
    return f"a trial in a separate process ended with exit status {child.returncode}{last}"
