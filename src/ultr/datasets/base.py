"""`Dataset`: requests with true labels in three splits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ultr.arguments import checked
from ultr.errors import DataError, OptionError, nearest
from ultr.log import Log
from ultr.simulate import MAX_GRADE

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Requests with true labels (grades 0 to `max_grade`) in three splits, and a digest of what they were made from."""

    name: str
    train: Log
    validation: Log
    test: Log
    max_grade: int
    fingerprint: str

    @checked
    def __getitem__(self, split: str) -> Log:
        if split not in SPLITS:
            raise OptionError(f"a data set has no split '{split}'", mend=nearest(split, SPLITS))
        log: Log = getattr(self, split)
        return log


def highest_grade(*logs: Log, where: object) -> int:
    """That of true labels, or a refusal of what no user can be simulated for."""
    highest = max(float(log.true_relevance.max()) for log in logs)
    if highest > MAX_GRADE:
        what = f"true labels ('relevance') should be grades up to {MAX_GRADE}"
        raise DataError(what, where=where, got=highest, mend="scale them, as to 0 to 4")
    return max(1, math.ceil(highest))
