"""How much memory torch allocates on a CPU, from its profiler."""

from typing import Any, NamedTuple

import torch


class Measured(NamedTuple):
    """What a function returned, and the bytes that torch had allocated for it: at most, and in the end."""

    result: Any
    peak: int
    kept: int


def measure(function):
    """Call a function without arguments."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        result = function()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    peak = total = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return Measured(result, peak, total)
