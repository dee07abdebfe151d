"""Tensors on disk: safetensors files with a checksum of their content."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from ultr.errors import DataError
from ultr.utils.jsonfiles import CHECKSUM


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors and their checksum to a file."""
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    path.write_bytes(save(copies, {CHECKSUM: _checksum(copies)}))  # save_file would let only its owner read it


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file; raise DataError if it cannot be read or its checksum is wrong."""
    try:
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            checksum = (file.metadata() or {}).get(CHECKSUM)
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot be read ({error})", where=path, hint="train again") from error
    if checksum is not None and checksum != _checksum(tensors):
        hint = "restore it from a copy, or train again"
        raise DataError("the file has changed since it was written", where=path, hint=hint)
    return tensors


def _checksum(tensors: dict[str, Tensor]) -> str:
    crc = 0
    for name, tensor in sorted(tensors.items()):
        crc = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        if tensor.numel():  # a slice without elements cannot be seen as bytes
            crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"
