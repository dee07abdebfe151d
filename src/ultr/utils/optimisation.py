"""Minimise a loss by L-BFGS or step by step, and stop training when evaluations no longer improve."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

# --- L-BFGS -----------------------------------------------------------------------------------------------------------


def minimise(parameters: Sequence[Tensor], loss: Callable[[], Tensor], *, iterations: int = 100) -> None:
    """Set parameters to values that minimise `loss()`, by scipy's L-BFGS in at most this many iterations.

    The optimizer of torch would first load the compiler of torch, which takes seconds.
    """
    from scipy.optimize import minimize

    def load(values: np.ndarray) -> None:
        start = 0
        with torch.no_grad():
            for each in parameters:
                part = values[start : start + each.numel()]
                each.copy_(torch.from_numpy(part).view_as(each))
                start += each.numel()

    def value_and_slope(values: np.ndarray) -> tuple[float, np.ndarray]:
        load(values)
        value = loss()
        slopes = torch.autograd.grad(value, parameters)
        return value.item(), torch.cat([slope.reshape(-1) for slope in slopes]).double().cpu().numpy()

    start = torch.cat([each.detach().reshape(-1) for each in parameters]).double().cpu().numpy()
    found = minimize(value_and_slope, start, jac=True, method="L-BFGS-B", options={"maxiter": iterations, "maxcor": 20})
    load(found.x)


# --- Early stopping ---------------------------------------------------------------------------------------------------


@dataclass
class EarlyStopping:
    """The best evaluation so far, the training step it was made at, and the number of evaluations without a gain.

    A gain is a value above the one at the last gain, by more than the share `least` of its size.
    """

    best: float = -math.inf
    best_step: int = 0
    waited: int = 0
    least: float = 0.0
    _at_gain: float = -math.inf

    def update(self, value: float, step: int) -> bool:
        """Record the value of an evaluation (larger is better); return whether it is the best so far."""
        margin = self.least * abs(self._at_gain) if math.isfinite(self._at_gain) else 0.0
        if value > self._at_gain + margin:
            self._at_gain, self.waited = value, 0
        else:
            self.waited += 1
        if value <= self.best:
            return False
        self.best, self.best_step = value, step
        return True

    def is_over(self, patience: int) -> bool:
        """Return whether the last `patience` evaluations brought no gain; never, if `patience` is 0."""
        return 0 < patience <= self.waited

    def to_json(self) -> dict[str, Any]:
        return {
            "best": self.best if math.isfinite(self.best) else None,
            "best_step": self.best_step,
            "waited": self.waited,
        }

    @staticmethod
    def from_json(content: dict[str, Any]) -> EarlyStopping:
        best = -math.inf if content["best"] is None else float(content["best"])
        return EarlyStopping(best, int(content["best_step"]), int(content["waited"]), _at_gain=best)


# --- Optimizers -------------------------------------------------------------------------------------------------------
# On a GPU, all state of an optimizer is on the GPU, so that a training step can be captured as a graph.

Optimizer = Literal["adagrad", "adam", "adamw"]
OF_TORCH: dict[Optimizer, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
ALIGNMENT = 64  # numbers; matrix kernels are faster on aligned rows


class FlatAdagrad:
    """Adagrad as in `torch.optim.Adagrad`, p -= lr · g / (√Σg² + eps).

    The parameters of each group are moved into one tensor, so that a step is a few kernels; `clip` limits the norm of
    the gradient of each group (0: no limit). `accumulator` is the first value of Σg². The learning rate is a tensor.
    torch's own Adagrad reads it on the CPU, so a graph would repeat that of the captured step; and its optimizers first
    load the compiler of torch, which takes seconds. With `runs`, parameters are [runs, ...] and learning rates [runs].
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        *,
        lr: Tensor,
        weight_decay: float = 0.0,
        clip: float = 0.0,
        eps: float = 1e-10,
        accumulator: float = 0.0,
        runs: int | None = None,
    ) -> None:
        settings = {"lr": lr, "weight_decay": weight_decay, "eps": eps}
        self.param_groups: list[dict[str, Any]] = [{"params": list(group), **settings} for group in groups if group]
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._clip, self._runs = clip, runs or 1
        # Of each group: its parameters by their place in the flat tensors; these; and sums of squared gradients.
        self._flat: list[tuple[list[Tensor], Tensor, Tensor]] = []
        for group in self.param_groups:
            parameters = sorted(group["params"], key=lambda p: p.numel() // self._runs % ALIGNMENT != 0)
            values = torch.cat([self._rows(p.detach()) for p in parameters], dim=1)
            sums, first = torch.full_like(values, accumulator), 0
            for p in parameters:
                place = slice(None), slice(first, first + p.numel() // self._runs)
                p.data = values[place].view(p.shape)
                # `step` is not used: it is for checkpoints, which torch's Adagrad can load too.
                self.state[p] = {"step": torch.zeros(()), "sum": sums[place].view(p.shape)}
                first = place[1].stop
            self._flat.append((parameters, values, sums))

    @property
    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; `set_to_none` is for calls of optimizers of torch, and must be True."""
        for p in self._parameters:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for group, (parameters, values, sums) in zip(self.param_groups, self._flat, strict=True):
            slopes = torch.cat([self._rows(torch.zeros_like(p) if p.grad is None else p.grad) for p in parameters], 1)
            if self._clip:
                norm = torch.linalg.vector_norm(slopes, dim=1, keepdim=True)
                slopes.mul_((self._clip / (norm + 1e-6)).clamp_(max=1))
            if group["weight_decay"]:
                slopes.add_(values, alpha=group["weight_decay"])
            sums.addcmul_(slopes, slopes)
            slopes.div_(sums.sqrt().add_(group["eps"]))
            values.sub_(slopes.mul_(group["lr"].view(-1, 1)))

    def copy_sums(self, other: FlatAdagrad, runs: list[int]) -> None:
        """Take the sums of squared gradients from some of the runs of another optimizer for the same parameters."""
        for group, others in zip(self.param_groups, other.param_groups, strict=True):
            for p, theirs in zip(group["params"], others["params"], strict=True):
                self.state[p]["sum"].copy_(other.state[theirs]["sum"][runs])

    def _rows(self, values: Tensor) -> Tensor:
        return values.reshape(self._runs, -1)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each parameter by its number, as torch's Adagrad does."""
        return {"state": {number: self.state[p] for number, p in enumerate(self._parameters)}, "param_groups": []}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load sums of squared gradients into the tensors that hold them."""
        for number, p in enumerate(self._parameters):
            self.state[p]["sum"].copy_(state_dict["state"][number]["sum"])


AnyOptimizer = FlatAdagrad | torch.optim.Optimizer


def make_optimizer(
    name: Optimizer,
    networks: Sequence[Sequence[Tensor]],
    *,
    lr: float,
    weight_decay: float,
    clip: float,
    device: torch.device,
    accumulator: float = 0.0,
) -> AnyOptimizer:
    """Make an optimizer by its name, for the parameters of some networks; on a GPU its learning rate is a tensor.

    `accumulator` is the first value of Adagrad's sums of squared gradients.
    """
    rate = torch.tensor(lr, device=device)
    if name == "adagrad":
        return FlatAdagrad(networks, lr=rate, weight_decay=weight_decay, clip=clip, accumulator=accumulator)
    parameters = [p for network in networks for p in network]
    if device.type != "cuda":
        fused = {"fused": True} if device.type == "cpu" else {}  # update all parameters in one pass
        return OF_TORCH[name](parameters, lr=lr, weight_decay=weight_decay, **fused)
    return OF_TORCH[name](parameters, lr=rate, weight_decay=weight_decay, fused=True, capturable=True)


def clip_gradients(optimizer: AnyOptimizer, networks: Sequence[Sequence[Tensor]], clip: float) -> None:
    """Limit the norm of the gradient of each network on its own: one with large gradients must not slow the others."""
    if clip and not isinstance(optimizer, FlatAdagrad):  # which does so itself
        for network in networks:
            if parameters := [p for p in network if p.grad is not None]:
                torch.nn.utils.clip_grad_norm_(parameters, clip)


def set_rate(optimizer: AnyOptimizer, rate: float) -> None:
    """Set the learning rate; a tensor keeps its place, because graphs read it there."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
