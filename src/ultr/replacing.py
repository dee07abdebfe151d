"""A run that replaces another is trained beside it, and takes its place when it is complete: until then, and whatever
happens, the old one can be used.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ultr.errors import OutputError
from ultr.files import REPLACED, atomic_path, output_errors, sync_folder, take_name

MARK = ".replaces"  # in a run that replaces another, to tell it from that when they have changed places


def successor(run: Path) -> Path:
    """Where the run is trained that will replace this one."""
    place = run.resolve()
    return place.parent / f".{place.name[:200]}.next" / place.name


def is_being_replaced(run: Path) -> bool:
    return (successor(run) / MARK).is_file()


def begin_successor(run: Path) -> None:
    """An empty place for the run that will replace this one; what an earlier attempt left there goes."""
    if run.is_mount():
        mend = "name a folder in it, or train into another and move what is in it"
        raise OutputError("a file system is mounted here, which no other folder can replace", where=run, mend=mend)
    place = successor(run)
    with atomic_path(place.parent, overwrite=True, folder=True) as holder:
        (holder / place.name).mkdir()
        (holder / place.name / MARK).touch()


def take_place(run: Path) -> None:
    """Put the run that was trained to replace this one in its place."""
    with output_errors(run):
        take_name(successor(run), run.resolve(), overwrite=True)
        sync_folder(run.resolve().parent)  # before the old one goes
    settle(run)


def settle(run: Path) -> None:
    """End a replacement that was killed when it had all but ended."""
    place = successor(run)
    with output_errors(run):
        if (before := place.parent / REPLACED / place.name).is_dir() and not run.exists():
            before.replace(run.resolve())
        if place.parent.is_dir() and not is_being_replaced(run):
            shutil.rmtree(place.parent)
        (run / MARK).unlink(missing_ok=True)
