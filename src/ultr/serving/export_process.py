"""Export of a run in a separate process, so that a server does not load torch.

Torch and its exporter would treble the server's memory, and delay requests while a newer model is exported.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path

from ultr.errors import DataError, MissingExtraError, UltrError

LOW_PRIORITY = 5  # the niceness of an export while another model is served
CHECK_SECONDS = 0.2  # between checks whether to stop


def export_in_process(run: Path, out: Path, *, stopped: threading.Event | None = None) -> Path:
    """Export a finished run to the folder `out` in a separate process, as `export_run` does; return the folder.

    With `stopped`, the process has a low priority, and ends when the event is set.
    """
    error_file = out.with_name(f"{out.name}-error.txt")
    arguments = (str(run.resolve()), str(out), str(error_file), stopped is not None)
    process = multiprocessing.get_context("spawn").Process(target=_export, args=arguments, daemon=True)
    process.start()
    while process.is_alive():
        if stopped is not None and stopped.is_set():
            process.terminate()
        process.join(CHECK_SECONDS)
    if error_file.is_file():
        raise DataError(error_file.read_text("utf-8"))
    if process.exitcode or not out.is_dir():
        raise DataError(f"the export failed with exit code {process.exitcode}", where=run, hint="try again")
    return out


def _export(run: str, out: str, error_file: str, low_priority: bool) -> None:
    if low_priority:
        os.nice(LOW_PRIORITY)
    try:
        try:
            import torch

            from ultr.serving.export import export_run
        except ModuleNotFoundError as error:
            need = "serving a run that is not exported"
            raise MissingExtraError(need, package=error.name or "torch", extra="export") from error
        torch.set_num_threads(1)
        export_run(run, out)
    except UltrError as error:
        Path(error_file).write_text(str(error), "utf-8", "replace")
