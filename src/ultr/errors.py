"""Every refusal of the package is an `UltrError` that says what, where, got, and how to mend.

UltrError
├── OptionError          an option or argument is wrong: mend the call        (exit 2)
├── DataError            a file, table or array cannot be used as it is       (exit 1)
│   ├── AbsentError      a named data set is not here
│   └── ColumnError      a column is missing, misspelt or holds bad values
├── LabelError           a label expression cannot be parsed or computed      (exit 1)
├── OutputError          an output exists already or cannot be written        (exit 1)
├── ProcessError         another process of the same training was lost        (exit 1)
├── UnfinishedError      the time given is up; what is done is kept           (exit 3)
└── MissingExtraError    an optional dependency is not installed              (exit 1)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UltrError(Exception):
    """`what` went wrong, `where`, what was `got`, and the `mend`."""

    exit_code = 1

    def __init__(self, what: str, *, where: object = None, got: object = None, mend: str | None = None) -> None:
        self.what, self.where, self.got, self.mend = what, where, got, mend
        text = f"{where}: {what}" if where is not None else what
        if got is not None:
            text += f", got {got}"
        if mend is not None:
            text += f"; {mend}"
        super().__init__(text)


class OptionError(UltrError):
    exit_code = 2


class DataError(UltrError):
    pass


class AbsentError(DataError):
    pass


class ColumnError(DataError):
    pass


class LabelError(UltrError):
    pass


class OutputError(UltrError):
    pass


class ProcessError(UltrError):
    pass


class UnfinishedError(UltrError):
    exit_code = 3


class MissingExtraError(UltrError):
    """An optional dependency is missing; the message names the command that installs it."""

    def __init__(self, need: str, *, package: str, extra: str) -> None:
        super().__init__(
            f"{need} needs the package '{package}', which is not installed",
            mend=f"install it with: pip install 'ultr[{extra}]'",
        )


def nearest(name: str, known: Iterable[str]) -> str:
    """A mend for an unknown name: the nearest known one if any is near, and otherwise the choices."""
    choices = sorted(set(known))
    near = difflib.get_close_matches(name.lower(), [c.lower() for c in choices], n=1, cutoff=0.6)
    if near:
        return f"did you mean '{next(c for c in choices if c.lower() == near[0])}'?"
    shown = ", ".join(choices[:20]) + (f" and {len(choices) - 20} more" if len(choices) > 20 else "")
    return f"known: {shown}" if choices else "there is none"
