"""Random sequences of appends, extensions, compactions, trims, reorders, copies and saves, each on a new store."""

import itertools

import numpy as np

from campaign.compacted import Compacted
from campaign.progress import Progress, Settings

GOAL, UNIT = 100_000, "sequences"
STEPS = 12


def run(settings: Settings, progress: Progress) -> None:
    only = settings.only
    for number in itertools.count() if only is None else [only]:
        if progress.over:
            return
        rng = np.random.default_rng([settings.seed, number])
        subject = Compacted(rng, settings.arch, number, settings.folder)
        try:
            for _ in range(STEPS):
                subject.step()
                if only is not None:
                    print(f"{number}: {subject.name}, {subject.doing}")
        except Exception as error:
            progress.fail(number, f"{subject.name}, {subject.doing}", error)
        progress.count()
