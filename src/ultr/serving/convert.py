"""A run's network as ONNX, made by a process of its own, so that torch and its exporter stay out of the server.

They would treble its memory, and hold up requests for as long as a newer model is made ready.
"""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from tempfile import TemporaryDirectory

from ultr.errors import DataError, UltrError
from ultr.exported import ONNX

GENTLY = 5  # niceness of what is made ready while others are served
REFUSAL = "refusal.txt"


def network_to_onnx(run: Path, *, gently: bool = False) -> bytes:
    """The ONNX of a finished run's network."""
    with TemporaryDirectory(prefix="ultr-onnx-") as folder:
        arguments = (str(run.resolve()), folder, gently)
        process = multiprocessing.get_context("spawn").Process(target=_convert, args=arguments, daemon=True)
        process.start()
        process.join()
        made, refusal = Path(folder) / ONNX, Path(folder) / REFUSAL
        if refusal.is_file():
            raise DataError(refusal.read_text())
        if process.exitcode or not made.is_file():
            raise DataError(f"its ONNX could not be made (exit code {process.exitcode})", where=run, mend="try again")
        return made.read_bytes()


def _convert(run: str, folder: str, gently: bool) -> None:
    """Write the ONNX of a run, or what is wrong with it."""
    if gently:
        os.nice(GENTLY)
    import torch

    from ultr.export import onnx_bytes
    from ultr.models import load_model

    torch.set_num_threads(1)
    try:
        content = onnx_bytes(load_model(run))
    except UltrError as error:
        (Path(folder) / REFUSAL).write_text(str(error))
    else:
        (Path(folder) / ONNX).write_bytes(content)
