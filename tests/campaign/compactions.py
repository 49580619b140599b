"""Random sequences of appends, extensions, compactions, trims, reorders, copies and saves, each on a new store."""

import itertools

import numpy as np

from campaign.compacted import Compacted
from campaign.compacted_pool import CompactedPool
from campaign.progress import Progress, Settings

GOAL, UNIT = 100_000, "sequences"
STEPS = 12
SUBJECTS = (CompactedPool, Compacted)


def run(settings: Settings, progress: Progress) -> None:
    only = settings.only
    for number in itertools.count() if only is None else [only]:
        if progress.over:
            return
        rng = np.random.default_rng([settings.seed, number])
        subject = SUBJECTS[number % 2](rng, settings.arch, number // 2, settings.folder)
        try:
            for _ in range(STEPS):
                subject.step()
                if only is not None:
                    print(f"{number}: {subject.name}, {subject.doing}")
        except Exception as error:
            progress.fail(number, f"{subject.name}, {subject.doing}", error)
        progress.count()
