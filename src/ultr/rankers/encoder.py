"""The encoder from raw features to the inputs of a network. It is part of the ranker, so rankers take raw features."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from ultr.errors import DataError

NUMBERS_AT_ONCE = 1 << 22  # numbers in a block of rows over which columns are summed
LIMIT = 10.0  # standardised features are clipped here, so that one outlier does not decide a score


class FeatureEncoder(nn.Module):
    """Standardise numbers, (x - mean) / deviation, and clip them; a missing one counts as the mean. Embed categories.

    A categorical feature is a column of codes from 0 to its size - 1. Code 0 is for values that were not in training.
    `categories` maps the index of a categorical feature to its size. `only` selects features by their index. For each
    feature in `indicators`, one more input is 1 where the feature is missing, and else 0.
    """

    mean: Tensor
    inverse_deviation: Tensor
    numeric: Tensor
    indicators: Tensor

    def __init__(
        self,
        features: int,
        categories: Mapping[int, int] | None = None,
        *,
        only: Collection[int] | None = None,
        indicators: Collection[int] = (),
    ) -> None:
        super().__init__()
        selected = range(features) if only is None else sorted(set(only))
        categories = {i: size for i, size in sorted((categories or {}).items()) if i in selected}
        numeric = [i for i in selected if i not in categories]
        self.features = features
        self.categories = categories
        self.register_buffer("mean", torch.zeros(len(numeric)))
        self.register_buffer("inverse_deviation", torch.ones(len(numeric)))
        self.register_buffer("numeric", torch.tensor(numeric, dtype=torch.int64), persistent=False)
        self.register_buffer("indicators", torch.tensor(sorted(indicators), dtype=torch.int64), persistent=False)
        dimensions = {i: min(32, 2 + round(1.6 * size**0.4)) for i, size in categories.items()}
        self.embeddings = nn.ModuleDict({str(i): nn.Embedding(size, dimensions[i]) for i, size in categories.items()})
        for embedding in self.embeddings.values():
            nn.init.zeros_(embedding.weight[0])  # type: ignore[index]  # an unseen value has no effect on the score

    @property
    def width(self) -> int:
        """The number of inputs of the network."""
        return len(self.mean) + len(self.indicators) + sum(self.dimension(i) for i in self.categories)

    def embedding(self, feature: int) -> Tensor:
        """Return the embeddings [categories, dimension] of the categorical feature with this index."""
        weight: Tensor = self.embeddings[str(feature)].weight  # type: ignore[assignment]
        return weight

    def dimension(self, feature: int) -> int:
        return self.embedding(feature).shape[1]

    def fit(self, matrix: np.ndarray) -> None:
        """Compute mean and deviation of the columns of `matrix` [rows, features], in double precision and in blocks.

        Inputs that a method appends to the features are not in `matrix`, and are not standardised.
        """
        columns = self.numeric.cpu().numpy()
        columns = columns[columns < matrix.shape[1]]
        total, squares, present = np.zeros(len(columns)), np.zeros(len(columns)), np.zeros(len(columns), np.int64)
        block = max(1, NUMBERS_AT_ONCE // max(1, matrix.shape[1]))

        def blocks() -> Iterator[np.ndarray]:
            for start in range(0, len(matrix), block):
                rows = matrix[start : start + block]
                yield rows if len(columns) == matrix.shape[1] else rows[:, columns]

        for rows in blocks():
            with np.errstate(invalid="ignore"):  # infinities raise an error below
                sums = rows.sum(0, dtype=np.float64)
                missing = np.isnan(rows).sum(0) if np.isnan(sums).any() else 0
                total += np.nansum(rows, 0, dtype=np.float64) if np.any(missing) else sums
            present += len(rows) - missing
        if not np.isfinite(total).all():
            place = int(columns[np.flatnonzero(~np.isfinite(total))[0]])
            raise DataError("features must be finite", got=f"infinity in column {place}", hint="replace or clip it")
        mean = total / np.maximum(1, present)
        for rows in blocks():
            centred = np.nan_to_num(rows - mean, copy=False, nan=0.0) if (present < len(matrix)).any() else rows - mean
            squares += np.einsum("ij,ij->j", centred, centred)
        deviation = np.sqrt(squares / np.maximum(1, present))
        constant = deviation <= 1e-6 * np.maximum(1e-6, np.abs(mean))
        inverse = np.where(constant, 0.0, 1 / np.where(constant, 1.0, deviation))  # constant features become 0
        self.mean[: len(columns)] = torch.from_numpy(mean)
        self.inverse_deviation[: len(columns)] = torch.from_numpy(np.minimum(inverse, torch.finfo(torch.float32).max))

    def forward(self, features: Tensor) -> Tensor:
        numbers = features if len(self.numeric) == self.features else features[..., self.numeric]
        numbers = ((numbers - self.mean) * self.inverse_deviation).nan_to_num(nan=0.0).clamp(-LIMIT, LIMIT)
        if len(self.indicators):
            numbers = torch.cat([numbers, features[..., self.indicators].isnan().to(numbers.dtype)], dim=-1)
        if not self.categories:
            return numbers
        embedded = [
            self.embeddings[str(i)](features[..., i].long().clamp(0, size - 1)) for i, size in self.categories.items()
        ]
        return torch.cat([numbers, *embedded], dim=-1)


class EncodedRanker(nn.Module):
    """A ranker that is a network of encoded features."""

    encoder: FeatureEncoder

    def first_layers(self) -> dict[str, nn.Linear]:
        """Return the layers that have the encoded features as inputs, by their name in this module."""
        raise NotImplementedError

    def start_at(self, slopes: Tensor, constants: Tensor) -> None:
        """Start at outputs that are linear in the standardised numbers: slopes [outputs, numbers] and constants."""
        raise NotImplementedError

    def resize_embedding(self, feature: int, dimension: int) -> None:
        """Replace the embeddings of a categorical feature by new ones, and the first layers, if the size is another."""
        if self.encoder.dimension(feature) == dimension:
            return
        size = self.encoder.categories[feature]
        device = self.encoder.embedding(feature).device
        self.encoder.embeddings[str(feature)] = nn.Embedding(size, dimension, device=device)
        for name, layer in self.first_layers().items():
            holder, _, key = name.rpartition(".")
            new = nn.Linear(self.encoder.width, layer.out_features, bias=layer.bias is not None, device=device)
            new.weight.requires_grad_(layer.weight.requires_grad)
            setattr(self.get_submodule(holder), key, new)
