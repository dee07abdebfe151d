"""Several processes that train one model, started by torchrun: what they sum, share and wait for.

Without torchrun there is one process, and nothing here does anything. Every process takes part in every call.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ultr.errors import DataError, OptionError, ProcessError

PATIENCE = timedelta(minutes=30)  # while the first process does what only one has to
PARTS = 8  # of every batch
SAID = "said"  # the first process's own refusal, which the others need not add to
LOST = "the run goes on from its last checkpoint: pass --resume, or let torchrun restart it (--max-restarts 3)"


@contextmanager
def joined(device: str = "auto") -> Iterator[None]:
    """Meet the other processes that torchrun started, if it did, and part from them at the end."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    own_gpu = device != "cpu" and torch.cuda.is_available() and local_size() <= torch.cuda.device_count()
    with _meeting():
        store = _meet("nccl" if own_gpu else "gloo")
    in_main_thread = threading.current_thread() is threading.main_thread()  # the only one that signals reach
    before = signal.signal(signal.SIGTERM, _told_to_stop) if in_main_thread else None
    try:
        yield
    except Exception as error:
        lost = isinstance(error, ProcessError)
        if is_first() and not lost and store is not None:
            store.set(SAID, "yes")
        elif not is_first() and lost and store is not None and store.check([SAID]):
            raise SystemExit(1) from error  # the first process has said why it ended
        raise
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
        dist.destroy_process_group()


def _meet(backend: str) -> Any:
    """Meet the others; gives what torchrun keeps for all of them, if it does."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=PATIENCE)
        return None
    # The addresses of processes that are gone are still in torchrun's store when it starts others in their place.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    known = dist.TCPStore(address, port, is_master=False, timeout=PATIENCE)  # type: ignore[attr-defined]
    store = dist.PrefixStore(f"ultr-{restarts()}", known)  # type: ignore[attr-defined]
    number, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=PATIENCE)
    return store


def _told_to_stop(*_: object) -> None:
    raise ProcessError("told to stop, as another process of this training was lost or by the system", mend=LOST)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this is the process that writes and speaks."""
    return rank() == 0


def local_rank() -> int:
    """The number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_size() -> int:
    """Processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def restarts() -> int:
    """How often torchrun has started the processes again, after one of them was lost."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def job() -> str:
    """What tells a torchrun from others, and stays the same when it starts processes again."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    return " ".join([*(os.environ.get(name, "") for name in names), str(os.getppid())])


def first_says(yes: bool) -> bool:
    """What the first process says, to all."""
    if size() == 1:
        return yes
    said = torch.tensor(int(yes), device="cuda" if dist.get_backend() == "nccl" else "cpu")
    take_from_first([said])
    return bool(said)


def summed(values: Tensor) -> Tensor:
    """The sum over processes, the same to the bit in each. It carries no gradient."""
    if size() == 1:
        return values
    total = values.detach().clone()
    with _meeting():
        dist.all_reduce(total)
    return total


def average_gradients(parameters: Iterable[Tensor], loss: Tensor, weight: Tensor) -> Tensor:
    """Give every process the gradients of the mean loss over all of them, by weight, and that loss, in one exchange."""
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


def take_from_first(tensors: Iterable[Tensor]) -> None:
    """Give every process the values that the first has."""
    if size() > 1:
        with _meeting():
            for tensor in tensors:
                dist.broadcast(tensor, src=0)


def wait_for_all() -> None:
    if size() > 1:
        with _meeting():
            dist.barrier()


def own_share(count: int) -> slice:
    """Which of so many things are this process's."""
    return slice(rank() * count // size(), (rank() + 1) * count // size())


def joined_shares(values: np.ndarray, count: int, device: torch.device) -> np.ndarray:
    """All of so many float32 values, of which each process has its share."""
    if size() == 1:
        return values
    whole = torch.zeros(count, device=device)
    whole[own_share(count)] = torch.from_numpy(values).to(device)
    return summed(whole).cpu().numpy()  # zero everywhere else: the sum is exact


def check_alike(number: int, what: str) -> None:
    """Refuse to go on where processes differ in a number that they should have in common."""
    if size() == 1:
        return
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    own = torch.tensor([number, -number], dtype=torch.int64, device=device)
    with _meeting():
        dist.all_reduce(own, op=dist.ReduceOp.MAX)
    if int(own[0]) != -int(own[1]):
        got = f"{-int(own[1])} to {int(own[0])}"
        raise DataError(
            f"processes differ in {what}", got=got, mend="put data and --out where all of them see the same"
        )


def parts_of(batch: int) -> list[tuple[int, int]]:
    """The parts of a step's batch that are this process's: the number of each, and its requests.

    A batch is made of eight parts, each with a stream of data and of random numbers of its own, so that one, two, four
    or eight processes take the same steps. Other numbers of processes have a part each.
    """
    if batch < size():
        raise OptionError(
            "a batch should hold a list for each process", got=f"{batch} for {size()}", mend="raise --batch"
        )
    parts = PARTS if PARTS % size() == 0 else size()
    bounds = [number * batch // parts for number in range(parts + 1)]
    here = own_share(parts)
    sizes = [(number, bounds[number + 1] - bounds[number]) for number in range(here.start, here.stop)]
    return [(number, requests) for number, requests in sizes if requests]


@contextmanager
def _meeting() -> Iterator[None]:
    """What the other processes have a part in, and may be lost in."""
    try:
        yield
    except RuntimeError as error:
        brief = " ".join(str(error).split())[:200]
        raise ProcessError(f"another process of this training was lost ({brief})", mend=LOST) from error
