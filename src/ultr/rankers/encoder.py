"""From raw features to what a network can take in; kept inside the model, so that scoring takes raw features too."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from ultr.errors import DataError

NUMBERS_AT_ONCE = 1 << 22  # of a matrix, where its columns are summed up
LIMIT = 10.0  # standardised features are clipped here: one outlier should not decide a score


class FeatureEncoder(nn.Module):
    """Numbers are standardised, (x - mean) / deviation, and clipped, missing ones stand at the mean; categories are
    embedded.

    A categorical feature is a column of codes 0 to its size - 1, where 0 stands for what was never seen in training.
    `categories` maps its place among the features to its size. `only` keeps to the features at these places.
    """

    mean: Tensor
    inverse_deviation: Tensor
    numeric: Tensor

    def __init__(
        self, features: int, categories: Mapping[int, int] | None = None, *, only: Collection[int] | None = None
    ) -> None:
        super().__init__()
        taken = range(features) if only is None else sorted(set(only))
        categories = {i: size for i, size in sorted((categories or {}).items()) if i in taken}
        numeric = [i for i in taken if i not in categories]
        self.features = features
        self.categories = categories
        self.register_buffer("mean", torch.zeros(len(numeric)))
        self.register_buffer("inverse_deviation", torch.ones(len(numeric)))
        self.register_buffer("numeric", torch.tensor(numeric, dtype=torch.int64), persistent=False)
        dimensions = {i: min(32, 2 + round(1.6 * size**0.4)) for i, size in categories.items()}
        self.embeddings = nn.ModuleDict({str(i): nn.Embedding(size, dimensions[i]) for i, size in categories.items()})
        for embedding in self.embeddings.values():
            nn.init.zeros_(embedding.weight[0])  # type: ignore[index]  # what was never seen says nothing
        self.width = len(numeric) + sum(dimensions.values())

    def fit(self, matrix: np.ndarray) -> None:
        """Learn mean and deviation from rows of features, in double precision and block by block.

        Inputs that a method adds behind the features are left as they are.
        """
        columns = self.numeric.cpu().numpy()
        columns = columns[columns < matrix.shape[1]]
        total, squares, known = np.zeros(len(columns)), np.zeros(len(columns)), np.zeros(len(columns), np.int64)
        block = max(1, NUMBERS_AT_ONCE // max(1, matrix.shape[1]))
        for start in range(0, len(matrix), block):
            rows = matrix[start : start + block][:, columns].astype(np.float64)
            with np.errstate(invalid="ignore"):  # of infinities, which are refused below
                total += np.nansum(rows, 0)
            known += (~np.isnan(rows)).sum(0)
        if not np.isfinite(total).all():
            place = int(columns[np.flatnonzero(~np.isfinite(total))[0]])
            raise DataError("features should be finite", got=f"infinity in column {place}", mend="fill or clip them")
        mean = total / np.maximum(1, known)
        for start in range(0, len(matrix), block):
            squares += np.nansum(np.square(matrix[start : start + block][:, columns] - mean), 0)
        deviation = np.sqrt(squares / np.maximum(1, known))
        constant = deviation <= 1e-6 * np.maximum(1e-6, np.abs(mean))
        inverse = np.where(constant, 0.0, 1 / np.where(constant, 1.0, deviation))  # constant features say nothing
        self.mean[: len(columns)] = torch.from_numpy(mean)
        self.inverse_deviation[: len(columns)] = torch.from_numpy(np.minimum(inverse, torch.finfo(torch.float32).max))

    def forward(self, features: Tensor) -> Tensor:
        numbers = features if len(self.numeric) == self.features else features[..., self.numeric]
        numbers = ((numbers - self.mean) * self.inverse_deviation).nan_to_num(nan=0.0).clamp(-LIMIT, LIMIT)
        if not self.categories:
            return numbers
        embedded = [
            self.embeddings[str(i)](features[..., i].long().clamp(0, size - 1)) for i, size in self.categories.items()
        ]
        return torch.cat([numbers, *embedded], dim=-1)
