"""Random sequences of what changes a store with summaries of pages, each on a new store; all of them compared."""

import itertools

import numpy as np

from campaign.progress import Progress, Settings
from campaign.summarized import SummarizedPool, SummarizedStore

GOAL, UNIT = 100_000, "sequences"
STEPS = 12
SUBJECTS = (SummarizedStore, SummarizedPool)


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
