"""Random operations, in rows of 100 on one subject, which is compared with its model as a whole after each."""

import itertools

import numpy as np

from campaign.calls import Calls
from campaign.compacted import Compacted
from campaign.compacted_pool import CompactedPool
from campaign.contiguous import Contiguous
from campaign.paged import Paged
from campaign.progress import Progress, Settings
from campaign.token_group_pool import TokenGroupPool
from campaign.token_groups import TokenGroups

GOAL, UNIT = 1_000_000, "operations"
ROW = 100
SUBJECTS = (Contiguous, Paged, Calls, Compacted, CompactedPool, TokenGroups, TokenGroupPool)


def run(settings: Settings, progress: Progress) -> None:
    only = settings.only
    for row in itertools.count(0 if only is None else only // ROW):
        rng = np.random.default_rng([settings.seed, row])
        subject = SUBJECTS[row % len(SUBJECTS)](rng, settings.arch, row // len(SUBJECTS), settings.folder)
        for number in range(row * ROW, (row + 1) * ROW):
            if progress.over or (only is not None and number > only):
                break
            try:
                subject.step()
            except Exception as error:
                progress.fail(number, f"{subject.name}, {subject.doing}", error)
                break
            finally:
                if only is not None:
                    print(f"{number}: {subject.name}, {subject.doing}")
            progress.count()
        if progress.over or only is not None:
            return
