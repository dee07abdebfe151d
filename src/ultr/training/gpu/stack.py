"""Several learners of one kind as one: their parameters are stacked, so that a step trains them all at once.

A step of a small network leaves most of a GPU idle, so a step of ten learners takes two to four times that of one. Each
learns as it would alone, up to rounding: from its own batches, with its own random numbers and its own learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ultr.lists import Lists
from ultr.methods.base import Learner
from ultr.rankers import Dropout, GivenMask
from ultr.training.config import TrainingOptions
from ultr.training.feed import FeedStack, noise_of
from ultr.training.gpu.graphs import GraphedSteps
from ultr.training.loop import precision, trained_networks
from ultr.utils.optimisation import FlatAdagrad


class Stack:
    """Learners of one kind with stacked parameters [learners, ...]; the tensors of each learner are views of these.

    `options` differ at most in their seeds and learning rates.
    """

    def __init__(self, learners: Sequence[Learner], options: Sequence[TrainingOptions]) -> None:
        first, self._options = learners[0], list(options)
        self.learners = list(learners)
        of_each = [{**dict(each.named_parameters()), **dict(each.named_buffers())} for each in learners]
        names = {id(tensor): name for name, tensor in of_each[0].items()}
        networks = [[names[id(p)] for p in network] for network in trained_networks(first)]
        trained = {name for network in networks for name in network}
        stacked = {
            name: torch.stack([tensors[name].detach() for tensors in of_each])
            for name, tensor in of_each[0].items()
            if tensor.is_floating_point()
        }
        self._trained = {name: tensor.requires_grad_() for name, tensor in stacked.items() if name in trained}
        self._fixed = {name: tensor for name, tensor in stacked.items() if name not in trained}
        self._shared = {name: tensor for name, tensor in of_each[0].items() if name not in stacked}
        device = next(iter(stacked.values())).device
        self._rates = torch.tensor([each.lr for each in options], device=device)
        self._optimizer = FlatAdagrad(
            [[self._trained[name] for name in network] for network in networks],
            lr=self._rates.clone(),
            weight_decay=options[0].weight_decay,
            clip=options[0].clip,
            accumulator=first.accumulator,
            runs=len(learners),
        )
        for number, tensors in enumerate(of_each):
            for name, tensor in stacked.items():
                tensors[name].data = tensor.detach()[number]
        self._call = _Call(first)

    def only(self, numbers: list[int]) -> Stack:
        """Return a stack of some of these learners, in their present state."""
        stack = Stack([self.learners[i] for i in numbers], [self._options[i] for i in numbers])
        stack._optimizer.copy_sums(self._optimizer, numbers)
        return stack

    @staticmethod
    def can_hold(learners: Sequence[Learner], options: Sequence[TrainingOptions]) -> bool:
        """Return whether learners can be trained together: by Adagrad, with the same shapes, without draws."""
        first = learners[0].state_dict()
        shapes = {name: tensor.shape for name, tensor in first.items()}
        whole = {name: tensor for name, tensor in first.items() if not tensor.is_floating_point()}
        return all(
            each.optimizer == "adagrad"
            and not learner.draws
            and {name: tensor.shape for name, tensor in learner.state_dict().items()} == shapes
            and all(torch.equal(learner.state_dict()[name], tensor) for name, tensor in whole.items())
            for learner, each in zip(learners, options, strict=True)
        )

    def steps(self, feed: FeedStack, first: int = 0) -> Callable[[], Tensor]:
        """Return a function that takes the next step of all learners and returns their losses [learners]."""
        device, number, factor = self._rates.device, first, 1.0
        graphed = GraphedSteps(feed, self.work, device) if device.type == "cuda" else None

        def step() -> Tensor:
            nonlocal number, factor
            options = self._options[0]
            if (new := options.learning_rate_at(number) / options.lr) != factor:
                factor = new
                for group in self._optimizer.param_groups:
                    group["lr"].copy_(self._rates * factor)
            losses = self.work(feed(number)) if graphed is None else graphed.take(number, graphed.choose(number))
            number += 1
            return losses

        return step

    def work(self, lists: Lists) -> Tensor:
        """Take a step of all learners with lists [learners · requests, length]; return their losses [learners]."""
        self.learners[0].train()
        count, masks = len(self.learners), self._masks(lists)
        tensors = {name: _by_learner(values, count) for name, values in _tensors(lists).items()}
        actions = {name: _by_learner(values, count) for name, values in lists.actions.items()}

        def call(what: str, trained: dict[str, Tensor]) -> Tensor:
            def of_one(
                trained: dict[str, Tensor],
                fixed: dict[str, Tensor],
                masks: dict[str, Tensor],
                tensors: dict[str, Tensor],
                actions: dict[str, Tensor],
            ) -> Tensor:
                own = {f"learner.{name}": value for name, value in {**trained, **fixed, **self._shared}.items()}
                batch = Lists(**tensors, actions=actions, parts=lists.parts)
                result: Tensor = functional_call(self._call, own, (what, batch, masks))
                return result

            return vmap(of_one)(trained, self._fixed, masks, tensors, actions)

        with torch.no_grad():
            call("update", self._trained)
        self._optimizer.zero_grad(set_to_none=True)
        with precision(lists.where.device, self._options[0]):
            losses = call("loss", self._trained)
            losses.sum().backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return losses.detach()

    def _masks(self, lists: Lists) -> dict[str, Tensor]:
        """Draw the dropout masks of all learners; the keys are the names of the dropout layers."""
        dropouts = [(name, m) for name, m in self.learners[0].named_modules() if isinstance(m, Dropout)]
        if not any(module.p and module.training for _, module in dropouts):
            return {}
        noise, masks = noise_of(lists), {}
        for layer, (name, module) in enumerate(dropouts):
            if module.p and module.training:
                masks[name] = _by_learner(module.drawn(noise, layer), len(self.learners))
        return masks


class _Call(nn.Module):
    """A module that calls `update` or `loss` of a learner with the given dropout masks."""

    def __init__(self, learner: Learner) -> None:
        super().__init__()
        self.learner = learner

    def forward(self, what: str, lists: Lists, masks: dict[str, Tensor]) -> Tensor:
        for name, mask in masks.items():
            self.learner.get_submodule(name).masks = GivenMask(mask)  # type: ignore[assignment]
        try:
            if what == "loss":
                return self.learner.loss(lists)
            self.learner.update(lists)
            return lists.weights.sum()
        finally:
            for name in masks:
                self.learner.get_submodule(name).masks = None  # type: ignore[assignment]


def _tensors(lists: Lists) -> dict[str, Tensor]:
    names = ("features", "where", "weights", "positions", "relevance")
    return {name: value for name in names if (value := getattr(lists, name)) is not None}


def _by_learner(values: Tensor, count: int) -> Tensor:
    return values.view(count, -1, *values.shape[1:])
