"""Optimizers by name. On a GPU, all their state is on the GPU, so that a training step can be captured as a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

Optimizer = Literal["adagrad", "adam", "adamw"]
ON_CPU: dict[Optimizer, Callable[..., torch.optim.Optimizer]] = {
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


class DeviceAdagrad(torch.optim.Optimizer):
    """Adagrad as in `torch.optim.Adagrad`, whose learning rate may be a tensor: p -= lr · g / (√Σg² + eps).

    torch's own reads its learning rate and its step number on the CPU, so a graph of it would repeat those of the step
    that was captured. A learning rate [runs] is for parameters [runs, ...] of several runs.
    """

    def __init__(
        self, parameters: Iterable[Tensor], *, lr: float | Tensor, weight_decay: float = 0.0, eps: float = 1e-10
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "eps": eps, "capturable": True})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"step": torch.zeros((), device=p.device), "sum": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            gradients = [p.grad for p in parameters]
            sums, steps = ([self.state[p][name] for p in parameters] for name in ("sum", "step"))
            if group["weight_decay"]:
                gradients = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
            torch._foreach_add_(steps, 1)
            torch._foreach_addcmul_(sums, gradients, gradients)
            scales = torch._foreach_sqrt(sums)
            torch._foreach_add_(scales, group["eps"])
            changes = torch._foreach_div(gradients, scales)
            lr = group["lr"]
            rates = [lr.view(-1, *[1] * (p.ndim - 1)) for p in parameters] if isinstance(lr, Tensor) and lr.ndim else lr
            torch._foreach_mul_(changes, rates)
            torch._foreach_sub_(parameters, changes)


def make_optimizer(
    name: Optimizer, parameters: Iterable[Tensor], *, lr: float, weight_decay: float, device: torch.device
) -> torch.optim.Optimizer:
    """Make an optimizer by its name; on a GPU its learning rate is a tensor (see `set_rate`)."""
    if device.type != "cuda":
        fused = {"fused": True} if device.type == "cpu" else {}  # update all parameters in one pass
        return ON_CPU[name](parameters, lr=lr, weight_decay=weight_decay, **fused)
    rate = torch.tensor(lr, device=device)
    if name == "adagrad":
        return DeviceAdagrad(parameters, lr=rate, weight_decay=weight_decay)
    return ON_CPU[name](parameters, lr=rate, weight_decay=weight_decay, fused=True, capturable=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate; a tensor keeps its place, because graphs read it there."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
