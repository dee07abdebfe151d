"""A ranker whose score is the product of two probabilities, such as that of a click and of a satisfied user."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import softplus


class Product(nn.Module):
    """A ranker with score = log(a(x) s(x)), from a network with two outputs: the logits of a and of s.

    The logarithm ranks as the product does, and does not become constant where both probabilities are near 1.
    """

    def __init__(self, ranker: nn.Module) -> None:
        super().__init__()
        self.ranker = ranker

    def outputs(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of a and of s of each item."""
        outputs: Tensor = self.ranker(features)
        return outputs[..., 0], outputs[..., 1]

    def forward(self, features: Tensor) -> Tensor:
        first, second = self.outputs(features)
        return -softplus(-first) - softplus(-second)  # not logsigmoid: in ONNX it would have few digits
