"""The devices and the processes that train a model, by their names and through torchrun."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ultr.errors import DataError, OptionError, ProcessError
from ultr.utils.arguments import checked

# --- Processes --------------------------------------------------------------------------------------------------------
# Communication between the processes that torchrun starts to train one model.
#
# All processes must make the same calls in the same order. Without torchrun there is one process, and nothing is sent.

TIMEOUT = timedelta(minutes=30)  # how long processes wait for each other; some work is done by the first alone
PARTS = 8  # a training batch is divided into this many parts; see `parts_of`
ERROR_REPORTED = "error-reported"  # key in the shared store: the first process prints an error, so the others do not
RESUME_HINT = "pass --resume to continue from the last checkpoint, or let torchrun do so: torchrun --max-restarts 3"


@contextmanager
def process_group(device: str = "auto") -> Iterator[None]:
    """Connect to the other processes that torchrun started, if any, and disconnect after the `with` block."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    one_gpu_each = device != "cpu" and torch.cuda.is_available() and local_size() <= torch.cuda.device_count()
    with _communication_errors():
        store = _connect("nccl" if one_gpu_each else "gloo")
    in_main_thread = threading.current_thread() is threading.main_thread()  # only it can handle signals
    previous_handler = signal.signal(signal.SIGTERM, _on_sigterm) if in_main_thread else None
    try:
        yield
    except Exception as error:
        if in_main_thread and os.environ["RANK"] == "0":  # torchrun stops it soon, and it has an error to print first
            previous_handler = signal.SIG_IGN
        another_failed = isinstance(error, ProcessError)
        if is_main() and not another_failed and store is not None:
            store.set(ERROR_REPORTED, "yes")
        elif not is_main() and another_failed and store is not None and store.check([ERROR_REPORTED]):
            raise SystemExit(1) from error  # the first process has reported the error
        raise
    finally:
        if previous_handler is not None:
            signal.signal(signal.SIGTERM, previous_handler)
        dist.destroy_process_group()


def _connect(backend: str) -> Any:
    """Connect to the other processes; return the key-value store of torchrun, or None if it has none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=TIMEOUT)
        return None
    # After a restart the store still has the addresses of failed processes, so each restart uses its own key prefix.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = dist.TCPStore(address, port, is_master=False, timeout=TIMEOUT)  # type: ignore[attr-defined]
    store = dist.PrefixStore(f"ultr-{restarts()}", shared)  # type: ignore[attr-defined]
    number, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=TIMEOUT)
    return store


def _on_sigterm(*_: object) -> None:
    raise ProcessError("stopped by the system, or because another process of this training failed", hint=RESUME_HINT)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Return whether this is the first process, which writes files and messages."""
    return rank() == 0


def local_size() -> int:
    """Return the number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def restarts() -> int:
    """Return how many times torchrun has restarted the processes after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def job_id() -> str:
    """Return an id of the torchrun that started this process; it stays the same when torchrun restarts processes."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    return " ".join([*(os.environ.get(name, "") for name in names), str(os.getppid())])


def main_decides(yes: bool) -> bool:
    """Return, in every process, the value of `yes` that the first process passed."""
    if size() == 1:
        return yes
    decision = torch.tensor(int(yes), device=_backend_device())
    copy_from_main([decision])
    return bool(decision)


def _backend_device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def summed(values: Tensor) -> Tensor:
    """Return the sum of `values` over all processes, bit for bit the same in each. It carries no gradient."""
    if size() == 1:
        return values
    total = values.detach().clone()
    with _communication_errors():
        dist.all_reduce(total)
    return total


def average_gradients(parameters: Iterable[Tensor], loss: Tensor, weight: Tensor) -> Tensor:
    """Set the gradients to their mean over processes, weighted by the `weight` of each; return the mean loss."""
    if size() == 1:
        return loss
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat(
        [*(gradient.view(-1) for gradient in gradients), loss.detach().view(1), torch.ones_like(loss).view(1)]
    )
    total = summed(flat * weight)
    total = total / total[-1]
    for gradient, mean in zip(gradients, torch.split(total[:-2], [g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))
    return total[-2]


def copy_from_main(tensors: Iterable[Tensor]) -> None:
    """Overwrite the tensors of every other process with the values of the first process."""
    if size() > 1:
        with _communication_errors():
            for tensor in tensors:
                dist.broadcast(tensor, src=0)


def barrier() -> None:
    """Wait until every process has called this function."""
    if size() > 1:
        with _communication_errors():
            dist.barrier()


def own_share(count: int) -> slice:
    """Return the slice that belongs to this process if the processes divide `count` things evenly."""
    return slice(rank() * count // size(), (rank() + 1) * count // size())


def gather_shares(values: Tensor, count: int) -> Tensor:
    """Return all `count` float32 values, in every process; `values` are those in this process's `own_share(count)`."""
    if size() == 1:
        return values
    whole = torch.zeros(count, device=values.device)
    whole[own_share(count)] = values
    return summed(whole)  # exact, because all but one of the terms are zero


def check_equal(number: int, what: str) -> None:
    """Raise DataError if `number`, which `what` describes, is not the same in every process."""
    if size() == 1:
        return
    bounds = torch.tensor([number, -number], dtype=torch.int64, device=_backend_device())
    with _communication_errors():
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    high, low = int(bounds[0]), -int(bounds[1])
    if low != high:
        hint = "put the data and --out on a disk that all processes share"
        raise DataError(f"processes differ in {what}", got=f"{low} to {high}", hint=hint)


def parts_of(batch: int) -> list[tuple[int, int]]:
    """Return the parts of a batch of `batch` requests that belong to this process: (index, number of requests) of each.

    A batch is divided into eight parts, and each part has its own order of the data and its own random numbers.
    Training is therefore the same with 1, 2, 4 or 8 processes. With any other number of processes, each has one part.
    """
    if batch < size():
        got = f"{batch} for {size()} processes"
        raise OptionError("a batch must have at least one request per process", got=got, hint="raise network.batch")
    parts = PARTS if PARTS % size() == 0 else size()
    bounds = [number * batch // parts for number in range(parts + 1)]
    sizes = [(number, bounds[number + 1] - bounds[number]) for number in range(parts)[own_share(parts)]]
    return [(number, requests) for number, requests in sizes if requests]


@contextmanager
def _communication_errors() -> Iterator[None]:
    """Turn errors of communication, which occur when another process fails, into a ProcessError."""
    try:
        yield
    except RuntimeError as error:
        brief = " ".join(str(error).split())[:200]
        raise ProcessError(f"another process of this training failed ({brief})", hint=RESUME_HINT) from error


# --- Devices ----------------------------------------------------------------------------------------------------------
# Torch devices by name: cpu, cuda, cuda:1, or auto (a GPU if this machine has one, else the CPU).

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
        number = int(os.environ.get("LOCAL_RANK", "0"))  # of this process among those on its machine
        name = f"cuda:{number % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    return as_device(name)
