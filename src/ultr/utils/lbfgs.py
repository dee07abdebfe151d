"""Minimise a loss by L-BFGS."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor


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
