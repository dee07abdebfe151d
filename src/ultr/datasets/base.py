"""`Dataset`: requests with true labels in three splits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ultr.arguments import checked
from ultr.errors import OptionError, nearest
from ultr.log import Log

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
