"""Torch devices by name: cpu, cuda, cuda:1, or auto (a GPU if this machine has one, else the CPU)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ultr.errors import OptionError
from ultr.utils.arguments import checked
from ultr.utils.distributed import local_rank

SMALL_LOG = 100_000  # rows below which one thread is used


def as_device(name: torch.device | str) -> torch.device:
    """Return a device by its name; raise OptionError if this machine cannot use it."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        if str(name).startswith("cuda") and not torch.cuda.is_available():
            hint = "use --device cpu"
            raise OptionError("this machine has no usable GPU", got=f"--device {name}", hint=hint) from error
        raise OptionError(f"there is no device '{name}'", hint="use cpu, cuda or cuda:1") from error
    if device.type == "meta":
        raise OptionError("the device 'meta' holds no values", hint="use cpu, cuda or cuda:1")
    return device


@contextmanager
def threads_for(rows: int) -> Iterator[None]:
    """Use one thread of torch for few rows, in a `with` block: more threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if rows < SMALL_LOG else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@checked
def choose_device(name: str) -> torch.device:
    """Return a device by its name; `auto` is a GPU if there is one, else the CPU."""
    if name == "auto":
        name = f"cuda:{local_rank() % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    return as_device(name)
