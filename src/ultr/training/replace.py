"""Replace a run directory (`ultr train --overwrite`) without a time in which there is no usable run.

The new run is trained in a hidden folder next to the old one, and gets the old one's name when it is complete.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ultr.errors import OutputError
from ultr.utils.files import REPLACED, atomic_path, output_errors, sync_folder, take_name

MARK = ".replaces"  # file in the new run, until it has replaced the old one


def successor(run: Path) -> Path:
    """Return the hidden folder `.NAME.next/NAME` in which the replacement of a run is trained."""
    place = run.resolve()
    return place.parent / f".{place.name[:200]}.next" / place.name


def is_being_replaced(run: Path) -> bool:
    return (successor(run) / MARK).is_file()


def begin_successor(run: Path) -> None:
    """Make an empty folder for the replacement of a run; one that was begun earlier is deleted."""
    if run.is_mount():
        hint = "pass --out with a folder inside it, or another path"
        raise OutputError("a file system is mounted here, so the folder cannot be replaced", where=run, hint=hint)
    place = successor(run)
    with atomic_path(place.parent, overwrite=True, folder=True) as holder:
        (holder / place.name).mkdir()
        (holder / place.name / MARK).write_text("")


def take_place(run: Path) -> None:
    """Give the complete replacement the name of the run, and delete the old run."""
    with output_errors(run):
        take_name(successor(run), run.resolve(), overwrite=True)
        sync_folder(run.resolve().parent)  # the new name is on disk before the old run is deleted
    settle(run)


def settle(run: Path) -> None:
    """Finish a replacement whose process was killed while it exchanged the two folders."""
    place = successor(run)
    with output_errors(run):
        if (old := place.parent / REPLACED / place.name).is_dir() and not run.exists():
            old.replace(run.resolve())
        if place.parent.is_dir() and not is_being_replaced(run):
            shutil.rmtree(place.parent)
        (run / MARK).unlink(missing_ok=True)
