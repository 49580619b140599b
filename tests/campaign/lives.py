"""Whole lives of a `TikvCache` in tiny models: random operations in any order, compared with no cache after each."""

import importlib.util
import itertools

import numpy as np

from campaign.progress import Progress, Settings

GOAL, UNIT = 100_000, "lives"


def run(settings: Settings, progress: Progress) -> None:
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing or settings.arch != "cpu":
        progress.remarks = f"not run: {', '.join(missing)} missing" if missing else "not run: on the CPU only"
        return
    import torch
    import transformers
    from lives import chosen, life

    torch.set_num_threads(1)  # models this small only wait for a second thread
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that nobody wrote is NaN: who reads it is seen
    transformers.logging.set_verbosity_error()

    def fails(other: chosen.Chosen) -> bool:
        try:
            other.live(settings.folder)
        except life.Wrong:
            return True
        return False

    for number in itertools.count() if settings.only is None else [settings.only]:
        if progress.over:
            return
        it = chosen.choose(np.random.default_rng([settings.seed, number]))
        if settings.only is not None:
            print(f"{number}: {it}")
        try:
            progress.kinds.update(it.live(settings.folder).counts)
        except life.Wrong as error:
            progress.fail(number, f"shortest: {chosen.shortest(it, fails)!r}", error)
        progress.count()
