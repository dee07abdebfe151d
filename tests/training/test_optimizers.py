from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from ultr.utils.optimisation import FlatAdagrad


def networks(dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 16), nn.ELU(), nn.Linear(16, 1)).to(dtype), nn.Linear(8, 3).to(dtype)]


def slopes(modules: list[nn.Module], step: int) -> None:
    rows = torch.randn(32, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    for module in modules:
        module.zero_grad(set_to_none=True)
        (module(rows) * 10).square().mean().backward()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_it_is_adagrad_of_torch_with_each_group_clipped_apart(weight_decay, clip):
    ours, theirs = networks(), networks()
    rate = torch.tensor(0.1, dtype=torch.float64)
    flat = FlatAdagrad([list(m.parameters()) for m in ours], lr=rate, weight_decay=weight_decay, clip=clip)
    expected = torch.optim.Adagrad(
        [p for module in theirs for p in module.parameters()], lr=0.1, weight_decay=weight_decay
    )
    for step in range(20):
        rate.fill_(0.1 / (1 + step))
        expected.param_groups[0]["lr"] = 0.1 / (1 + step)
        slopes(ours, step)
        slopes(theirs, step)
        if clip:
            for module in theirs:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
        flat.step()
        expected.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.state_dict(), other.state_dict(), rtol=1e-12, atol=1e-12)


def test_its_state_can_be_saved_and_loaded_and_goes_on_with_the_same_bits():
    ours = networks()
    flat = FlatAdagrad([list(m.parameters()) for m in ours], lr=torch.tensor(0.1))
    for step in range(3):
        slopes(ours, step)
        flat.step()
    other = copy.deepcopy(ours)
    loaded = FlatAdagrad([list(m.parameters()) for m in other], lr=torch.tensor(0.1))
    loaded.load_state_dict(copy.deepcopy(flat.state_dict()))
    for step in range(3, 6):
        for modules, optimizer in ((ours, flat), (other, loaded)):
            slopes(modules, step)
            optimizer.step()
    for mine, theirs in zip(ours, other, strict=True):
        assert all(torch.equal(mine.state_dict()[name], tensor) for name, tensor in theirs.state_dict().items())


def test_its_state_is_that_of_torch_so_that_a_run_can_resume_on_another_device():
    ours, theirs = networks(), networks()
    flat = FlatAdagrad([list(m.parameters()) for m in ours], lr=torch.tensor(0.1, dtype=torch.float64))
    slopes(ours, 0)
    flat.step()
    slopes(theirs, 0)
    of_torch = torch.optim.Adagrad([p for module in theirs for p in module.parameters()], lr=0.1)
    of_torch.step()
    mine, other = flat.state_dict()["state"], of_torch.state_dict()["state"]
    assert mine.keys() == other.keys()
    for number in mine:
        assert mine[number].keys() == other[number].keys()
        torch.testing.assert_close(mine[number]["sum"], other[number]["sum"])


def test_a_parameter_without_a_gradient_keeps_its_value():
    module = nn.Linear(3, 2)
    before = module.bias.detach().clone()
    flat = FlatAdagrad([list(module.parameters())], lr=torch.tensor(0.1))
    module.weight.grad = torch.ones_like(module.weight)
    flat.step()
    assert torch.equal(module.bias.detach(), before)


def test_training_does_not_load_the_compiler_of_torch():
    code = """
import sys, torch
from ultr.utils.optimisation import make_optimizer
weight = torch.nn.Parameter(torch.ones(3))
optimizer = make_optimizer("adagrad", [[weight]], lr=0.1, weight_decay=0.0, clip=1.0, device=torch.device("cpu"))
optimizer.zero_grad()
weight.sum().backward()
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
assert weight.max() < 1
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
