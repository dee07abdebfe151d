"""The errors of the package. Each says what is wrong, where, the value, and what to do; `exit` is the CLI's exit code.

UltrError
├── OptionError          an option or argument is wrong                       (exit 2)
├── DataError            a file, table or array cannot be used as it is       (exit 1)
│   ├── AbsentError      a data set or a run was not found
│   ├── DivergedError    the loss of a training run is not finite
│   └── ColumnError      a column is missing, misspelt or holds bad values
├── LabelError           a label expression cannot be parsed or computed      (exit 1)
├── OutputError          an output exists already or cannot be written        (exit 1)
├── ProcessError         another process of the same training failed          (exit 1)
├── UnfinishedError      the time limit was reached; finished work is saved   (exit 3)
├── NetworkError         a store or service could not be reached after retries (exit 4)
└── MissingExtraError    an optional dependency is not installed              (exit 1)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# The modules of the extra `train`. A server of exported models is installed without them.
TRAIN_PACKAGES = frozenset(
    {
        *("fsspec", "jinja2", "lightgbm", "numba", "plotly", "pyarrow", "pydantic", "safetensors", "scipy", "sklearn"),
        *("threadpoolctl", "torch"),
    }
)


class UltrError(Exception):
    """The base class of all errors, with the message "where: what, got VALUE; hint"; only `what` is required."""

    exit_code = 1

    def __init__(self, what: str, *, where: object = None, got: object = None, hint: str | None = None) -> None:
        self.what, self.where, self.got, self.hint = what, where, got, hint
        text = f"{where}: {what}" if where is not None else what
        if got is not None:
            text += f", got {got}"
        if hint is not None:
            text += f"; {hint}"
        super().__init__(text)


class OptionError(UltrError):
    exit_code = 2


class DataError(UltrError):
    pass


class AbsentError(DataError):
    pass


class ColumnError(DataError):
    pass


class DivergedError(DataError):
    pass


class LabelError(UltrError):
    pass


class OutputError(UltrError):
    pass


class ProcessError(UltrError):
    pass


class UnfinishedError(UltrError):
    exit_code = 3


class NetworkError(UltrError):
    exit_code = 4


class MissingExtraError(UltrError):
    """A package that `need`, such as a command, requires is not installed; the message has the install command."""

    def __init__(self, need: str, *, package: str, extra: str) -> None:
        super().__init__(
            f"{need} needs the package '{package}', which is not installed",
            hint=f"install it with: pip install 'ultr[{extra}]'",
        )


def missing_for_training(need: str, error: ModuleNotFoundError) -> UltrError | None:
    """Return the error for a failed import if the missing package belongs to the extra `train`, and None otherwise."""
    package = (error.name or "").split(".")[0]
    return MissingExtraError(need, package=package, extra="train") if package in TRAIN_PACKAGES else None


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the hint "did you mean 'X'?", where X is the known name most similar to `name`; None if no name is."""
    by_lower = {choice.lower(): choice for choice in sorted(set(known), reverse=True)}
    matches = difflib.get_close_matches(name.lower(), sorted(by_lower), n=1, cutoff=0.6)
    return f"did you mean '{by_lower[matches[0]]}'?" if matches else None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the most similar known name, or else a list of at most 20 known names."""
    choices = sorted(set(known))
    if hint := closest(name, choices):
        return hint
    more = f" and {len(choices) - 20} more" if len(choices) > 20 else ""
    return f"use one of {', '.join(choices[:20])}{more}" if choices else "there are no names to choose from"
