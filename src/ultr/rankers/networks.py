"""Networks as rankers: the encoder of features, dropout, a linear ranker and a multi-layer perceptron."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from ultr.errors import DataError, OptionError
from ultr.lists import Part
from ultr.utils.arguments import checked
from ultr.utils.noise import Noise

# --- Dropout ----------------------------------------------------------------------------------------------------------
# Dropout and Gumbel noise that do not depend on how a batch is divided among processes.

LEVELS = 1 << 16  # 16 random bits decide whether a value is dropped
LEAST = 2.0**-25  # a uniform number of 0 is replaced by this one, because its logarithm must be finite


def _below(keep: float) -> int:
    """Return the number of the levels at which a value is kept."""
    return max(1, round(keep * LEVELS))


def _kept(generator: np.random.Generator, below: int, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(generator.integers(0, LEVELS, shape, dtype=np.uint16) < below)


class Masks:
    """The dropout masks of one training step on the CPU: each part of a batch has its own NumPy generator and seed.

    NumPy's generators are several times as fast as torch's.
    """

    def __init__(self, parts: Sequence[Part], seeds: Sequence[int], where: Tensor) -> None:
        self._parts = parts
        of_parts = torch.split(where.sum(-1), [part.requests for part in parts])
        self._shape, self._rows = where.shape, [int(lengths.sum()) for lengths in of_parts]
        self._generators = [np.random.Generator(np.random.SFC64(seed)) for seed in seeds]

    def draw(self, like: Tensor, keep: float) -> Tensor:
        """Draw a mask for values [requests, length, ...] or, of items alone, [rows, units]: 1/keep, or 0 at random."""
        below = _below(keep)
        if like.ndim == 2 and len(like) == sum(self._rows) and like.shape != self._shape:
            shapes = [(rows, *like.shape[1:]) for rows in self._rows]
            parts = [_kept(generator, below, shape) for generator, shape in zip(self._generators, shapes, strict=True)]
            return torch.cat(parts).to(like.dtype).mul_(LEVELS / below)
        kept, first = torch.zeros(like.shape, dtype=torch.bool), 0
        for part, generator in zip(self._parts, self._generators, strict=True):
            of_part = _kept(generator, below, (part.requests, part.longest, *like.shape[2:]))
            kept[first : first + part.requests, : part.longest] = of_part
            first += part.requests
        return kept.to(like.dtype).mul_(LEVELS / below)

    def uniform(self, where: Tensor, units: int) -> Tensor:
        """Draw uniform numbers [requests, length, units], at least 0 and below 1; 0.5 for padding."""
        numbers, first = torch.full((*where.shape, units), 0.5), 0
        for part, generator in zip(self._parts, self._generators, strict=True):
            drawn = generator.random((part.requests, part.longest, units), dtype=np.float32)
            numbers[first : first + part.requests, : part.longest] = torch.from_numpy(drawn)
            first += part.requests
        return numbers


class DeviceMask:
    """The dropout mask of one layer in one training step on a GPU; layers are numbered by `layer`."""

    def __init__(self, noise: Callable[[], Noise], layer: int) -> None:
        self._noise, self._layer = noise, layer

    def draw(self, like: Tensor, keep: float) -> Tensor:
        """Draw a mask for values [requests, length] or [..., units]: 1/keep with probability `keep`, else 0."""
        return self._noise().kept(keep, *like.shape[2:], mask=self._layer).to(like.dtype)

    def uniform(self, where: Tensor, units: int) -> Tensor:
        """Draw uniform numbers [requests, length, units] of this layer, above 0 and below 1."""
        return self._noise().uniforms(units, mask=self._layer)


class GivenMask:
    """A dropout mask, or uniform numbers in its place, that were drawn before."""

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask

    def draw(self, like: Tensor, keep: float) -> Tensor:
        return self._mask.to(like.dtype)

    def uniform(self, where: Tensor, units: int) -> Tensor:
        return self._mask


class _Draws:
    """Dropout masks from a generator of NumPy."""

    def draw(self, like: Tensor, keep: float) -> Tensor:
        """Draw a mask for values of any shape: 1/keep with probability `keep`, else 0."""
        generator = np.random.Generator(np.random.SFC64(int(torch.randint(1 << 62, ()))))
        below = _below(keep)
        return _kept(generator, below, tuple(like.shape)).to(like.dtype).mul_(LEVELS / below)


class Dropout(nn.Dropout):
    """Dropout as in `torch.nn.Dropout`, but with the given `masks` in training if they are set.

    With masks, values are [requests, length, units], or [requests, length] if `units` is 0. Without masks on a CPU, a
    generator of NumPy draws them, with a seed from torch's.
    """

    def __init__(self, p: float = 0.5, units: int = 0) -> None:
        super().__init__(p)
        self.units = units

    masks: Masks | DeviceMask | GivenMask | None = None

    def forward(self, values: Tensor) -> Tensor:
        if not self.training or not self.p or (self.masks is None and values.device.type != "cpu"):
            return super().forward(values)
        masks = _Draws() if self.masks is None else self.masks
        return values * masks.draw(values, 1 - self.p)

    def drawn(self, noise: Noise, layer: int) -> Tensor:
        """Draw the mask of this layer, whose number is `layer`, as `forward` does on a GPU."""
        return noise.kept(1 - self.p, *((self.units,) if self.units else ()), mask=layer)


class Gumbel(Dropout):
    """Standard Gumbel noise for each item of a list, from the random numbers of dropout; zero if not in training.

    An order by score plus noise is a draw from the Plackett-Luce model of the scores.
    """

    def __init__(self, samples: int) -> None:
        super().__init__(units=samples)

    def forward(self, where: Tensor) -> Tensor:
        """Return noise [samples, requests, length] for lists with these items."""
        if not self.training:
            return torch.zeros((self.units, *where.shape), device=where.device)
        if self.masks is None:
            numbers = torch.rand((*where.shape, self.units), device=where.device)
        else:
            numbers = self.masks.uniform(where, self.units)
        return -torch.log(-torch.log(numbers.clamp(min=LEAST))).movedim(-1, 0)

    def drawn(self, noise: Noise, layer: int) -> Tensor:
        return noise.uniforms(self.units, mask=layer)


# --- Encoder ----------------------------------------------------------------------------------------------------------
# The encoder from raw features to the inputs of a network. It is part of the ranker, so rankers take raw features.

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
        total = np.zeros(len(columns))
        squares = np.zeros(len(columns))
        present = np.zeros(len(columns), np.int64)
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
    """A ranker that is a network of encoded features.

    While `items` is set, to the mask of the items of a padded batch, the outputs of padding are 0 and not computed.
    """

    encoder: FeatureEncoder
    items: Tensor | None = None

    def forward(self, features: Tensor) -> Tensor:
        if self.items is None or features.shape[:-1] != self.items.shape:
            outputs = self.outputs_of(features)
        else:
            rows = self.outputs_of(features[self.items])
            outputs = rows.new_zeros(*self.items.shape, rows.shape[-1]).index_put((self.items,), rows)
        return outputs.squeeze(-1) if outputs.shape[-1] == 1 else outputs

    def outputs_of(self, features: Tensor) -> Tensor:
        """Return the outputs [..., outputs] of features [..., features]."""
        raise NotImplementedError

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


class LinearRanker(EncodedRanker):
    """A ranker with score = w · x + b of the encoded features."""

    def __init__(self, encoder: FeatureEncoder, *, outputs: int = 1) -> None:
        super().__init__()
        self.encoder = encoder
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # of a log without features
            self.output = nn.Linear(encoder.width, outputs)

    def first_layers(self) -> dict[str, nn.Linear]:
        return {"output": self.output}

    @torch.no_grad()
    def start_at(self, slopes: Tensor, constants: Tensor) -> None:
        self.output.weight.zero_()
        self.output.weight[:, : slopes.shape[1]] = slopes
        self.output.bias.copy_(constants)

    def outputs_of(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.output(self.encoder(features))
        return outputs


Norm = Literal["none", "layer"]
HIDDEN = (512, 256, 128)  # default units of the hidden layers, as in the paper of `pairwise-em` (CIKM 2022)


class MLPRanker(EncodedRanker):
    """A ranker of hidden layers with ELU, optionally layer normalisation and dropout, and linear outputs.

    If `separate` is true, each output has hidden layers of its own; if it is "first", only the first output has. With
    `skip`, a linear function of the inputs is added to the outputs; it is not trained, and zero until `start_at` sets
    it. With `networks` above 1, the outputs of so many networks stand next to each other. There is no batch
    normalisation, because the score of an item must not depend on its batch.
    """

    @checked
    def __init__(
        self,
        encoder: FeatureEncoder,
        *,
        hidden: Sequence[int] = HIDDEN,
        dropout: float = 0.0,
        norm: Norm = "none",
        separate: bool | Literal["first"] = False,
        skip: bool = False,
        networks: int = 1,
        outputs: int = 1,
    ) -> None:
        super().__init__()
        if not len(hidden) or min(hidden) < 1:
            raise OptionError("'hidden' must have at least one layer, each with at least one unit", got=tuple(hidden))
        if not 0 <= dropout < 1:
            raise OptionError("'dropout' must be at least 0 and below 1", got=dropout)
        self.encoder = encoder
        sizes = (encoder.width, *hidden)
        self.layers: nn.Module
        parts = [outputs]
        if separate and outputs > 1:
            parts = [1, outputs - 1] if separate == "first" else [1] * outputs
        made = [_layers(sizes, part, dropout, norm) for part in parts * networks]
        self.layers = made[0] if len(made) == 1 else _Parallel(made)
        self.skip = nn.Linear(encoder.width, networks * outputs, bias=False) if skip else None
        if self.skip is not None:
            nn.init.zeros_(self.skip.weight.requires_grad_(False))

    def first_layers(self) -> dict[str, nn.Linear]:
        parts = range(len(self.layers)) if isinstance(self.layers, _Parallel) else ()
        names = [f"layers.{part}.0" for part in parts] or ["layers.0"]
        names += ["skip"] if self.skip is not None else []
        return {name: self.get_submodule(name) for name in names}  # type: ignore[misc]

    @torch.no_grad()
    def start_at(self, slopes: Tensor, constants: Tensor) -> None:
        if self.skip is None:
            raise ValueError("only a network with a skip can start at a linear function")
        self.skip.weight[:, : slopes.shape[1]] = slopes
        networks = self.layers if isinstance(self.layers, _Parallel) else [self.layers]
        lasts = [[layer for layer in network.modules() if isinstance(layer, nn.Linear)][-1] for network in networks]
        first = 0
        for last in lasts:
            last.weight.zero_()
            last.bias.copy_(constants[first : first + last.out_features])
            first += last.out_features

    def anchor(self, features: Tensor) -> Tensor:
        """Return the linear function [..., outputs] that is added to the outputs; 0 without `skip`."""
        if self.skip is None:
            return features.new_zeros(*features.shape[:-1], 1)
        anchor: Tensor = self.skip(self.encoder(features))
        return anchor

    def outputs_of(self, features: Tensor) -> Tensor:
        inputs = self.encoder(features)
        outputs: Tensor = self.layers(inputs)
        return outputs if self.skip is None else outputs + self.skip(inputs)


def _layers(sizes: Sequence[int], outputs: int, dropout: float, norm: Norm) -> nn.Module:
    layers: list[nn.Module] = []
    for size_in, size_out in pairwise(sizes):
        layers.append(nn.Linear(size_in, size_out))
        if norm == "layer":
            layers.append(nn.LayerNorm(size_out))
        layers.append(nn.ELU())
        if dropout:
            layers.append(Dropout(dropout, size_out))
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


class _Parallel(nn.ModuleList):
    """Networks whose outputs stand next to each other."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([network(inputs) for network in self], dim=-1)
