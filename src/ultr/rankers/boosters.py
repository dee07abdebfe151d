"""LightGBM and XGBoost with one interface: grow trees round by round, save, load and score."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ultr.errors import DataError, MissingExtraError, OptionError, UltrError, nearest
from ultr.rankers.tree_objective import PairwiseObjective

VALUES_PER_THREAD = 4_000_000  # rows times features for each thread of LightGBM
PLAIN_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, eq=False)
class TreeRows:
    """Rows of features, request by request, and the other columns that an objective of the library uses."""

    features: np.ndarray  # [rows, features]; NaN is a missing value
    lengths: np.ndarray | None  # rows of each request; None if the objective does not use requests
    names: tuple[str, ...]
    categorical: tuple[int, ...] = ()  # columns of codes
    label: np.ndarray | None = None
    weights: np.ndarray | None = None  # [requests], or [rows] if the objective does not use requests
    positions: np.ndarray | None = None  # for LightGBM's own correction of position bias
    offset: np.ndarray | None = None  # [rows] added to the sum of the trees in training, and not when they predict

    @property
    def row_weights(self) -> np.ndarray | None:
        if self.weights is None or self.lengths is None:
            return self.weights
        return np.repeat(self.weights, self.lengths)

    @property
    def plain_names(self) -> list[str] | None:
        """The names of features if LightGBM and XGBoost accept them, else None."""
        plain = (
            bool(self.names)
            and len(set(self.names)) == len(self.names)
            and all(PLAIN_NAME.fullmatch(name) for name in self.names)
        )
        return list(self.names) if plain else None


def with_missing_values(features: np.ndarray, categorical: tuple[int, ...]) -> np.ndarray:
    """Replace code 0 of categories (a missing or unseen value) by NaN, which tree libraries treat as missing."""
    if not categorical:
        return features
    columns = list(categorical)
    features = features.copy()
    features[:, columns] = np.where(features[:, columns] == 0, np.nan, features[:, columns])
    return features


@dataclass(frozen=True)
class Boosting:
    """The settings for growing trees: rounds, learning rate, seed, parameters of the library, and the objective."""

    rounds: int
    lr: float
    seed: int = 0
    parameters: Mapping[str, Any] = field(default_factory=dict)  # of the library, set by the user
    objective: PairwiseObjective | Callable[..., tuple[np.ndarray, np.ndarray]] | None = None
    library_options: Mapping[str, Any] = field(default_factory=dict)  # used if `objective` is None


AfterRound = Callable[["Booster", int], bool]  # called with the trees and the number of rounds so far; True stops


class Booster:
    """Boosted trees of LightGBM or XGBoost, finished or still growing."""

    LIBRARY: ClassVar[str]
    FILE: ClassVar[str]  # name of the file of trees in a saved model
    RESERVED: ClassVar[frozenset[str]]  # parameters that the user cannot set

    def __init__(self, trees: Any, rounds: int, categorical: tuple[int, ...] = (), first: int | None = None) -> None:
        self.trees, self.rounds, self.categorical = trees, rounds, categorical
        self.first = rounds if first is None else first  # rounds of the first training, before updates added others

    @classmethod
    def grow(cls, rows: TreeRows, how: Boosting, after_round: AfterRound, *, start: Booster | None = None) -> None:
        """Grow trees until `after_round` returns True or all rounds are done; `start` has the trees of the first."""
        raise NotImplementedError

    @classmethod
    def load(cls, path: Path, categorical: tuple[int, ...] = ()) -> Booster:
        raise NotImplementedError

    def save(self, path: Path, *, rounds: int) -> None:
        """Write the first `rounds` rounds to a file in the library's format."""
        raise NotImplementedError

    def shortened(self, rounds: int) -> Booster:
        """Return a copy that has only the first `rounds` rounds."""
        raise NotImplementedError

    def to_extend(self, most: int) -> Booster:
        """Return the trees that an update extends: all, or those of the first training if there are `most` or more."""
        return self if self.rounds < most else self.shortened(self.first)

    def predict(self, features: np.ndarray, first: int = 0, last: int | None = None) -> np.ndarray:
        """Return the sum [rows] of the trees of rounds `first` to `last` - 1 for each row."""
        raise NotImplementedError


class LightGBM(Booster):
    LIBRARY, FILE = "lightgbm", "lightgbm.txt"
    RESERVED = frozenset({
        "objective", "learning_rate", "num_iterations", "seed", "metric", "label_gain", "early_stopping_round",
        "num_class",
    })  # fmt: skip

    @classmethod
    def grow(cls, rows: TreeRows, how: Boosting, after_round: AfterRound, *, start: Booster | None = None) -> None:
        lightgbm, categorical = tree_library("lightgbm"), rows.categorical
        objective = how.library_options if how.objective is None else {"objective": how.objective}
        parameters = {**lightgbm_parameters(how.lr, how.seed, rows.features.size), **how.parameters, **objective}

        def after(env: Any) -> None:
            if after_round(cls(env.model, env.iteration + 1, categorical), env.iteration + 1):
                raise lightgbm.callback.EarlyStopException(env.iteration, [])

        try:
            lightgbm.train(
                parameters,
                lightgbm_data(rows),
                num_boost_round=how.rounds - (0 if start is None else start.rounds),
                init_model=None if start is None else start.trees,
                callbacks=[after],
            )
        except lightgbm.basic.LightGBMError as error:
            raise lightgbm_error(error) from error

    @classmethod
    def load(cls, path: Path, categorical: tuple[int, ...] = ()) -> Booster:
        lightgbm = tree_library("lightgbm")
        try:
            if "\nend of trees" not in path.read_text():  # LightGBM would end the process on an incomplete file
                raise DataError("the file is incomplete", where=path, hint="train again")
            trees = lightgbm.Booster(model_file=str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot be read ({error})", where=path, hint="train again") from error
        except lightgbm.basic.LightGBMError as error:
            raise DataError(f"cannot be read by LightGBM ({error})", where=path, hint="train again") from error
        return cls(trees, trees.current_iteration(), categorical)

    def save(self, path: Path, *, rounds: int) -> None:
        # Python writes the file, because LightGBM does not raise an OSError, or any error, if the disk is full.
        text = self.trees.model_to_string(num_iteration=rounds)
        # A resumed run asks LightGBM for fewer rounds. Its file must be equal to that of a run without a stop.
        text = re.sub(r"^\[num_iterations: \d+\]$", f"[num_iterations: {rounds}]", text, flags=re.MULTILINE)
        path.write_text(text, encoding="utf-8")

    def shortened(self, rounds: int) -> Booster:
        text = self.trees.model_to_string(num_iteration=rounds)
        return LightGBM(
            tree_library("lightgbm").Booster(model_str=text), rounds, self.categorical, min(self.first, rounds)
        )

    def predict(self, features: np.ndarray, first: int = 0, last: int | None = None) -> np.ndarray:
        count = (self.rounds if last is None else last) - first
        if not (count and len(features)):
            return np.zeros(len(features))
        return np.asarray(
            self.trees.predict(
                with_missing_values(features, self.categorical),
                start_iteration=first,
                num_iteration=count,
                raw_score=True,
                num_threads=_threads(features.size),
            )
        )


def lightgbm_error(error: Exception) -> UltrError:
    """Return the UltrError to raise for an error of LightGBM, which rejected rows or parameters."""
    if "num_features" in str(error):
        hint = "check that features vary, and that there are enough rows for two leaves (min_data_in_leaf)"
        return DataError("LightGBM found no feature to split rows by", hint=hint)
    return OptionError(
        f"LightGBM: {' '.join(str(error).split())}", hint="check trees.parameters and the options of the method"
    )


def lightgbm_data(rows: TreeRows) -> Any:
    """Return the rows as a `lightgbm.Dataset`."""
    return tree_library("lightgbm").Dataset(
        with_missing_values(rows.features, rows.categorical),
        label=np.zeros(len(rows.features), np.float32) if rows.label is None else rows.label,
        group=rows.lengths,
        weight=rows.row_weights,
        position=rows.positions,
        init_score=rows.offset,
        feature_name=rows.plain_names or "auto",
        categorical_feature=list(rows.categorical) or "auto",
    )


def _threads(values: int) -> int:
    """Return the number of threads of LightGBM: they wait for each other, which takes longer than a small table."""
    return min(torch.get_num_threads(), max(1, values // VALUES_PER_THREAD))


def lightgbm_parameters(lr: float, seed: int, values: int) -> dict[str, Any]:
    """Return parameters for LightGBM on so many values; only the seed and the number of threads change results."""
    return {
        "deterministic": True,
        "force_row_wise": True,
        "num_threads": _threads(values),
        "verbosity": -1,
        "metric": "none",
        "learning_rate": lr,
        "seed": seed,
    }


class XGBoost(Booster):
    LIBRARY, FILE = "xgboost", "xgboost.json"
    RESERVED = frozenset(
        {"objective", "learning_rate", "eta", "num_boost_round", "seed", "eval_metric", "base_score", "num_class"}
    )

    @classmethod
    def grow(cls, rows: TreeRows, how: Boosting, after_round: AfterRound, *, start: Booster | None = None) -> None:
        xgboost = tree_library("xgboost")
        categorical = rows.categorical
        data = xgboost.QuantileDMatrix(
            with_missing_values(rows.features, categorical),
            label=np.zeros(len(rows.features), np.float32) if rows.label is None else rows.label,
            group=rows.lengths,
            weight=rows.weights,  # for ranking, XGBoost takes a weight for each request
            base_margin=rows.offset,
            feature_names=rows.plain_names,
            feature_types=["c" if i in categorical else "q" for i in range(rows.features.shape[1])]
            if categorical
            else None,
            enable_categorical=bool(categorical),
            nthread=torch.get_num_threads(),
            **{name: value for name, value in how.parameters.items() if name == "max_bin"},
        )
        parameters = {
            "nthread": torch.get_num_threads(),
            "verbosity": 0,
            "base_score": 0.0,
            **how.parameters,
            **(how.library_options if how.objective is None else {}),
            "disable_default_eval_metric": True,
            "learning_rate": how.lr,
            "seed": how.seed,
        }

        class After(xgboost.callback.TrainingCallback):  # type: ignore[misc,name-defined]
            def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
                rounds = model.num_boosted_rounds()
                return after_round(cls(model, rounds, categorical), rounds)

        try:
            xgboost.train(
                parameters,
                data,
                num_boost_round=how.rounds - (0 if start is None else start.rounds),
                obj=how.objective,
                xgb_model=None if start is None else start.trees,
                callbacks=[After()],
            )
        except xgboost.core.XGBoostError as error:
            raise OptionError(
                f"XGBoost: {_message(error)}", hint="check trees.parameters and the options of the method"
            ) from error

    @classmethod
    def load(cls, path: Path, categorical: tuple[int, ...] = ()) -> Booster:
        xgboost = tree_library("xgboost")
        try:
            trees = xgboost.Booster(model_file=str(path))
        except xgboost.core.XGBoostError as error:
            raise DataError(f"cannot be read by XGBoost ({_message(error)})", where=path, hint="train again") from error
        return cls(trees, trees.num_boosted_rounds(), categorical)

    def save(self, path: Path, *, rounds: int) -> None:
        path.write_bytes(self.trees[:rounds].save_raw("json"))

    def shortened(self, rounds: int) -> Booster:
        return XGBoost(self.trees[:rounds], rounds, self.categorical, min(self.first, rounds))

    def predict(self, features: np.ndarray, first: int = 0, last: int | None = None) -> np.ndarray:
        last = self.rounds if last is None else last
        if last == first or not len(features):
            return np.zeros(len(features))
        self.trees.set_param({"nthread": torch.get_num_threads()})
        margins = self._margins(features, first, last)
        if first:  # XGBoost adds its base score to every range of rounds
            one = features[:1]
            parts = self._margins(one, 0, first) + self._margins(one, first, last)
            margins = margins - (parts - self._margins(one, 0, last))
        return margins

    def _margins(self, features: np.ndarray, first: int, last: int) -> np.ndarray:
        data = tree_library("xgboost").DMatrix(
            with_missing_values(features, self.categorical),
            feature_names=self.trees.feature_names,
            feature_types=self.trees.feature_types,
            enable_categorical=bool(self.categorical),
            nthread=torch.get_num_threads(),
        )
        return np.asarray(self.trees.predict(data, iteration_range=(first, last), output_margin=True), np.float64)


def _message(error: Exception) -> str:
    """Return the message of an XGBoost error without its stack trace."""
    return " ".join(str(error).split("Stack trace:")[0].split())


BOOSTERS: dict[str, type[Booster]] = {"lightgbm": LightGBM, "xgboost": XGBoost}


def is_trees(ranker: str) -> bool:
    """Return True if `ranker` is the name of a tree ranker: lightgbm or xgboost."""
    return ranker in BOOSTERS


def library_version(ranker: str) -> dict[str, str]:
    """Return {name: version} of the library of a tree ranker; empty for other rankers."""
    return {ranker: str(tree_library(ranker).__version__)} if is_trees(ranker) else {}


def tree_library(ranker: str) -> Any:
    """Return the module of a library: lightgbm or xgboost."""
    try:
        if ranker == "lightgbm":
            import lightgbm

            return lightgbm
        import xgboost
    except ImportError as error:
        raise MissingExtraError(f"the ranker {ranker}", package=ranker, extra="trees") from error
    except OSError as error:
        raise UltrError(f"{ranker} cannot be loaded ({error})", hint="install libgomp (Debian: libgomp1)") from error
    return xgboost


class TreeRanker(nn.Module):
    """Trees as a ranker: from features [..., features] to scores [...], computed on the CPU.

    Only the trees of the first `rounds` rounds are used, or all trees if `rounds` is not given.
    """

    def __init__(self, booster: Booster, rounds: int | None = None) -> None:
        super().__init__()
        self.booster, self.rounds = booster, booster.rounds if rounds is None else rounds

    def forward(self, features: Tensor) -> Tensor:
        rows = features.reshape(-1, features.shape[-1]).cpu().numpy()
        scores = torch.from_numpy(self.booster.predict(rows, 0, self.rounds).astype(np.float32))
        return scores.view(features.shape[:-1]).to(features.device)


# --- Parameters -------------------------------------------------------------------------------------------------------
# The parameters of LightGBM and XGBoost that a user sets: parse and check them.


def check_parameters(ranker: str, parameters: Mapping[str, Any], *, features: int = 1) -> None:
    """Raise an error if the library of a ranker is not installed, or if a parameter is reserved or rejected by it."""
    kind = BOOSTERS[ranker]
    tree_library(ranker)
    names = _names_of_lightgbm() if ranker == "lightgbm" else {}
    for name, value in parameters.items():
        if names and name not in names:
            raise OptionError(f"lightgbm has no parameter '{name}'", hint=nearest(name, names))
        parameter = names.get(name, name)
        if parameter in kind.RESERVED:
            hint = "use method.name, trees.lr, trees.rounds, trees.patience, training.seed or training.select instead"
            raise OptionError(f"'{name}' of {kind.LIBRARY} cannot be set as a parameter", hint=hint)
        if parameter in ("boosting", "booster") and value not in ("gbdt", "gbtree", "goss"):
            hint = "remove it: later rounds must not change earlier trees"
            raise OptionError(f"'{name}={value}' cannot be evaluated round by round", hint=hint)
    if parameters:  # try one round on random rows, so that wrong values are found before long work starts
        rng = np.random.default_rng(0)
        rows = TreeRows(rng.random((200, features), np.float32), None, (), label=rng.random(200, np.float32))
        squared = {"objective": "regression" if ranker == "lightgbm" else "reg:squarederror"}
        kind.grow(rows, Boosting(1, 0.1, parameters=parameters, library_options=squared), lambda *_: True)


def parse_parameters(texts: Iterable[str]) -> dict[str, Any]:
    """Parse parameters of a tree library from texts key=value; values become numbers where possible."""
    parameters: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (equals and name):
            raise OptionError("a parameter must have the form key=value", got=f"'{text}'", hint="add = and a value")
        try:
            number = float(value)
            parameters[name] = int(value) if number == int(number) and not {".", "e"} & {*value} else number
        except (ValueError, OverflowError):
            parameters[name] = value
    return parameters


def _names_of_lightgbm() -> dict[str, str]:
    """Return LightGBM's parameter for each name and alias of it; empty if the library has no table of aliases."""
    aliases: Any = getattr(tree_library("lightgbm").basic, "_ConfigAliases", None)
    try:
        aliases.get("num_leaves")
        return {name: parameter for parameter, names in aliases.aliases.items() for name in [parameter, *names]}
    except (AttributeError, TypeError):
        return {}
