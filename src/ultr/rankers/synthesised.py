"""A ranker that predicts the actions of a label (click, dwell, ...); its score is the label of the predictions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from ultr.log.labels import Label


class Synthesised(nn.Module):
    """A ranker with score = Φ(predicted actions), where Φ is the expression of the label.

    `ranker` has an output for each action of the label. For actions that are 0 or 1 (`binary`) it is a logit. For other
    actions the prediction is `scale` · softplus(output), because actions are not negative.
    """

    scale: Tensor
    is_binary: Tensor

    def __init__(self, ranker: nn.Module, label: Label, binary: Sequence[str]) -> None:
        super().__init__()
        self.ranker, self.label = ranker, label
        self.binary = tuple(name for name in label.actions if name in binary)
        self.register_buffer("scale", torch.ones(len(label.actions)))
        is_binary = torch.tensor([name in self.binary for name in label.actions])
        self.register_buffer("is_binary", is_binary, persistent=False)

    def outputs(self, features: Tensor) -> Tensor:
        """Return the output of the network for each action: [..., actions]."""
        outputs: Tensor = self.ranker(features)
        return outputs if len(self.scale) > 1 else outputs[..., None]

    def forward(self, features: Tensor) -> Tensor:
        outputs = self.outputs(features)
        predicted = torch.where(self.is_binary, outputs.sigmoid(), self.scale * softplus(outputs))
        scores: Tensor = self.label(dict(zip(self.label.actions, predicted.unbind(-1), strict=True)), check=False)
        return scores
