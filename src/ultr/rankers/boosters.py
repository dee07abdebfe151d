"""LightGBM and XGBoost behind one shape: rows by request, an objective of our own or the library's, round by round."""

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
from ultr.rankers.trees import PairwiseObjective

PLAIN_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, eq=False)
class TreeRows:
    """Rows of features, adjacent by request, and what a library's own objective reads beside them."""

    features: np.ndarray  # [rows, features]; NaN is a missing value
    lengths: np.ndarray | None  # rows of each request; None where requests play no part
    names: tuple[str, ...]
    categorical: tuple[int, ...] = ()  # columns of codes
    label: np.ndarray | None = None
    weights: np.ndarray | None = None  # [requests], or [rows] where requests play no part
    positions: np.ndarray | None = None  # for LightGBM's own correction of position bias

    @property
    def row_weights(self) -> np.ndarray | None:
        if self.weights is None or self.lengths is None:
            return self.weights
        return np.repeat(self.weights, self.lengths)

    @property
    def plain_names(self) -> list[str] | None:
        """The names of features, if both libraries take them."""
        plain = (
            bool(self.names)
            and len(set(self.names)) == len(self.names)
            and all(PLAIN_NAME.fullmatch(name) for name in self.names)
        )
        return list(self.names) if plain else None


def as_libraries_have_it(features: np.ndarray, categorical: tuple[int, ...]) -> np.ndarray:
    """Code 0 of a category stands for what is missing or was never seen: a missing value to the libraries."""
    if not categorical:
        return features
    columns = list(categorical)
    features = features.copy()
    features[:, columns] = np.where(features[:, columns] == 0, np.nan, features[:, columns])
    return features


@dataclass(frozen=True)
class Boosting:
    """How trees are grown: rounds, rate, seed, parameters of the library, and what it does besides our objective."""

    rounds: int
    lr: float
    seed: int = 0
    parameters: Mapping[str, Any] = field(default_factory=dict)  # of the library, as the user has them
    objective: PairwiseObjective | Callable[..., tuple[np.ndarray, np.ndarray]] | None = None
    own: Mapping[str, Any] = field(default_factory=dict)  # the library's own objective, where there is none of ours


AfterRound = Callable[["Booster", int], bool]  # the trees so far and their number; True stops


class Booster:
    """Trees of a library that have been grown, or are."""

    LIBRARY: ClassVar[str]
    FILE: ClassVar[str]  # the library's own file
    TAKEN: ClassVar[frozenset[str]]  # parameters that are not the user's to set

    def __init__(self, trees: Any, rounds: int, categorical: tuple[int, ...] = ()) -> None:
        self.trees, self.rounds, self.categorical = trees, rounds, categorical

    @classmethod
    def grow(cls, rows: TreeRows, how: Boosting, after_round: AfterRound, *, start: Path | None = None) -> None:
        """Grow trees until `after_round` stops it or all rounds are done; `start` is a file of trees to go on from."""
        raise NotImplementedError

    @classmethod
    def load(cls, path: Path, categorical: tuple[int, ...] = ()) -> Booster:
        raise NotImplementedError

    def save(self, path: Path, *, rounds: int) -> None:
        """Write the first so many rounds as the library's own file."""
        raise NotImplementedError

    def predict(self, features: np.ndarray, first: int = 0, last: int | None = None) -> np.ndarray:
        """The sum of the trees of rounds `first` to `last`, not counting it, for each row."""
        raise NotImplementedError


class LightGBM(Booster):
    LIBRARY, FILE = "lightgbm", "lightgbm.txt"
    TAKEN = frozenset(
        {
            "objective",
            "learning_rate",
            "num_iterations",
            "seed",
            "metric",
            "label_gain",
            "early_stopping_round",
            "num_class",
        }
    )

    @classmethod
    def grow(cls, rows: TreeRows, how: Boosting, after_round: AfterRound, *, start: Path | None = None) -> None:
        lightgbm, categorical = _lightgbm(), rows.categorical
        own = how.own if how.objective is None else {"objective": how.objective}
        parameters = {**lightgbm_parameters(how.lr, how.seed), **how.parameters, **own}

        def after(env: Any) -> None:
            if after_round(cls(env.model, env.iteration + 1, categorical), env.iteration + 1):
                raise lightgbm.callback.EarlyStopException(env.iteration, [])

        done = 0 if start is None else cls.load(start).rounds
        try:
            lightgbm.train(
                parameters,
                lightgbm_data(rows),
                num_boost_round=how.rounds - done,
                init_model=None if start is None else str(start),
                callbacks=[after],
            )
        except lightgbm.basic.LightGBMError as error:
            raise refusal_of_lightgbm(error) from error

    @classmethod
    def load(cls, path: Path, categorical: tuple[int, ...] = ()) -> Booster:
        lightgbm = _lightgbm()
        try:
            if "\nend of trees" not in path.read_text():  # on what was cut short the library ends the process
                raise DataError("the file was cut short", where=path, mend="train again")
            trees = lightgbm.Booster(model_file=str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot be read ({error})", where=path, mend="train again") from error
        except lightgbm.basic.LightGBMError as error:
            raise DataError(f"cannot be read by LightGBM ({error})", where=path, mend="train again") from error
        return cls(trees, trees.current_iteration(), categorical)

    def save(self, path: Path, *, rounds: int) -> None:
        # Not by the library's own hand: on a full disk its error is none of the system's, or it has none.
        text = self.trees.model_to_string(num_iteration=rounds)
        # A run that went on has asked for fewer rounds, and is the same for all that.
        text = re.sub(r"^\[num_iterations: \d+\]$", f"[num_iterations: {rounds}]", text, flags=re.MULTILINE)
        path.write_text(text, encoding="utf-8")

    def predict(self, features: np.ndarray, first: int = 0, last: int | None = None) -> np.ndarray:
        count = (self.rounds if last is None else last) - first
        if not (count and len(features)):
            return np.zeros(len(features))
        return np.asarray(
            self.trees.predict(
                as_libraries_have_it(features, self.categorical),
                start_iteration=first,
                num_iteration=count,
                raw_score=True,
                num_threads=torch.get_num_threads(),
            )
        )


def refusal_of_lightgbm(error: Exception) -> UltrError:
    """What to say where LightGBM refuses rows or parameters."""
    if "num_features" in str(error):
        mend = "check that features vary, and that there are more rows than two leaves must have"
        return DataError("LightGBM finds no feature to split rows by", mend=mend)
    return OptionError(f"LightGBM: {' '.join(str(error).split())}", mend="check --ranker-option and --option")


def lightgbm_data(rows: TreeRows) -> Any:
    """Rows as LightGBM takes them."""
    return _lightgbm().Dataset(
        as_libraries_have_it(rows.features, rows.categorical),
        label=np.zeros(len(rows.features), np.float32) if rows.label is None else rows.label,
        group=rows.lengths,
        weight=rows.row_weights,
        position=rows.positions,
        feature_name=rows.plain_names or "auto",
        categorical_feature=list(rows.categorical) or "auto",
    )


def lightgbm_parameters(lr: float, seed: int) -> dict[str, Any]:
    """What is the same for all of LightGBM's trees: the same bits from the same seed and number of threads."""
    return {
        "deterministic": True,
        "force_row_wise": True,
        "num_threads": torch.get_num_threads(),
        "verbosity": -1,
        "metric": "none",
        "learning_rate": lr,
        "seed": seed,
    }


class XGBoost(Booster):
    LIBRARY, FILE = "xgboost", "xgboost.json"
    TAKEN = frozenset(
        {"objective", "learning_rate", "eta", "num_boost_round", "seed", "eval_metric", "base_score", "num_class"}
    )

    @classmethod
    def grow(cls, rows: TreeRows, how: Boosting, after_round: AfterRound, *, start: Path | None = None) -> None:
        xgboost = _xgboost()
        categorical = rows.categorical
        data = xgboost.QuantileDMatrix(
            as_libraries_have_it(rows.features, categorical),
            label=np.zeros(len(rows.features), np.float32) if rows.label is None else rows.label,
            group=rows.lengths,
            weight=rows.weights,  # of requests, which is what ranking has
            feature_names=rows.plain_names,
            feature_types=_feature_types(rows.features.shape[1], categorical),
            enable_categorical=bool(categorical),
            nthread=torch.get_num_threads(),
            **{name: value for name, value in how.parameters.items() if name == "max_bin"},
        )
        parameters = {
            "nthread": torch.get_num_threads(),
            "verbosity": 0,
            "base_score": 0.0,
            **how.parameters,
            **(how.own if how.objective is None else {}),
            "disable_default_eval_metric": True,
            "learning_rate": how.lr,
            "seed": how.seed,
        }

        class After(xgboost.callback.TrainingCallback):  # type: ignore[misc,name-defined]
            def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
                rounds = model.num_boosted_rounds()
                return after_round(cls(model, rounds, categorical), rounds)

        done = 0 if start is None else cls.load(start).rounds
        try:
            xgboost.train(
                parameters,
                data,
                num_boost_round=how.rounds - done,
                obj=how.objective,
                xgb_model=None if start is None else str(start),
                callbacks=[After()],
            )
        except xgboost.core.XGBoostError as error:
            raise OptionError(f"XGBoost: {_said(error)}", mend="check --ranker-option and --option") from error

    @classmethod
    def load(cls, path: Path, categorical: tuple[int, ...] = ()) -> Booster:
        xgboost = _xgboost()
        try:
            trees = xgboost.Booster(model_file=str(path))
        except xgboost.core.XGBoostError as error:
            raise DataError(f"cannot be read by XGBoost ({_said(error)})", where=path, mend="train again") from error
        return cls(trees, trees.num_boosted_rounds(), categorical)

    def save(self, path: Path, *, rounds: int) -> None:
        path.write_bytes(self.trees[:rounds].save_raw("json"))

    def predict(self, features: np.ndarray, first: int = 0, last: int | None = None) -> np.ndarray:
        last = self.rounds if last is None else last
        if last == first or not len(features):
            return np.zeros(len(features))
        self.trees.set_param({"nthread": torch.get_num_threads()})
        found = self._margins(features, first, last)
        if first:  # the library adds its base score to every part
            one = features[:1]
            parts = self._margins(one, 0, first) + self._margins(one, first, last)
            found = found - (parts - self._margins(one, 0, last))
        return found

    def _margins(self, features: np.ndarray, first: int, last: int) -> np.ndarray:
        data = _xgboost().DMatrix(
            as_libraries_have_it(features, self.categorical),
            feature_names=self.trees.feature_names,
            feature_types=self.trees.feature_types,
            enable_categorical=bool(self.categorical),
            nthread=torch.get_num_threads(),
        )
        return np.asarray(self.trees.predict(data, iteration_range=(first, last), output_margin=True), np.float64)


def _said(error: Exception) -> str:
    """What XGBoost said, without where in its code it did."""
    return " ".join(str(error).split("Stack trace:")[0].split())


def _feature_types(features: int, categorical: tuple[int, ...]) -> list[str] | None:
    return ["c" if i in categorical else "q" for i in range(features)] if categorical else None


BOOSTERS: dict[str, type[Booster]] = {"lightgbm": LightGBM, "xgboost": XGBoost}


def is_trees(ranker: str) -> bool:
    """Whether a ranker, by its name, is made of trees."""
    return ranker in BOOSTERS


def library_version(ranker: str) -> dict[str, str]:
    """Which library a ranker is made by, if by one, and its version."""
    return {ranker: str(_library(ranker).__version__)} if is_trees(ranker) else {}


def _library(ranker: str) -> Any:
    return (_lightgbm if ranker == "lightgbm" else _xgboost)()


def check_parameters(ranker: str, parameters: Mapping[str, Any], *, features: int = 1) -> None:
    """Refuse what is not the user's to set, values the library refuses, and libraries that are not there."""
    kind = BOOSTERS[ranker]
    _library(ranker)
    names = _names_of_lightgbm() if ranker == "lightgbm" else {}
    for name, value in parameters.items():
        if names and name not in names:
            raise OptionError(f"lightgbm has no parameter '{name}'", mend=nearest(name, names))
        own = names.get(name, name)
        if own in kind.TAKEN:
            mend = "use --method, --lr, --steps, --patience, --seed and --select"
            raise OptionError(f"'{name}' of {kind.LIBRARY} is not set by hand", mend=mend)
        if own in ("boosting", "booster") and value not in ("gbdt", "gbtree", "goss"):
            mend = "leave it out: what is grown must not change later"
            raise OptionError(f"'{name}={value}' cannot be evaluated round by round", mend=mend)
    if parameters:  # a round on random rows, before anything long is done with them
        rng = np.random.default_rng(0)
        rows = TreeRows(rng.random((200, features), np.float32), None, (), label=rng.random(200, np.float32))
        squared = {"objective": "regression" if ranker == "lightgbm" else "reg:squarederror"}
        kind.grow(rows, Boosting(1, 0.1, parameters=parameters, own=squared), lambda *_: True)


def parse_parameters(texts: Iterable[str]) -> dict[str, Any]:
    """Parameters of a library from texts that read key=value; what reads as a number is one."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (equals and name):
            raise OptionError("a parameter reads key=value", got=f"'{text}'")
        try:
            number = float(value)
            found[name] = int(value) if number == int(number) and "." not in value and "e" not in value else number
        except (ValueError, OverflowError):
            found[name] = value
    return found


def _names_of_lightgbm() -> dict[str, str]:
    """The parameter that each name or alias stands for; none where the library does not tell."""
    aliases: Any = getattr(_lightgbm().basic, "_ConfigAliases", None)
    try:
        aliases.get("num_leaves")
        return {name: own for own, names in aliases.aliases.items() for name in [own, *names]}
    except (AttributeError, TypeError):
        return {}


class TreeRanker(nn.Module):
    """Trees as a ranker like any other: from features [..., features] to scores [...]. They run on the CPU."""

    def __init__(self, booster: Booster) -> None:
        super().__init__()
        self.booster = booster

    def forward(self, features: Tensor) -> Tensor:
        rows = features.reshape(-1, features.shape[-1]).cpu().numpy()
        scores = torch.from_numpy(self.booster.predict(rows).astype(np.float32))
        return scores.view(features.shape[:-1]).to(features.device)


def _lightgbm() -> Any:
    try:
        import lightgbm
        import lightgbm.callback
    except ImportError as error:
        raise MissingExtraError("the ranker lightgbm", package="lightgbm", extra="trees") from error
    except OSError as error:
        raise DataError(f"LightGBM cannot be loaded ({error})", mend="install libgomp (Debian: libgomp1)") from error
    return lightgbm


def _xgboost() -> Any:
    try:
        import xgboost
    except ImportError as error:
        raise MissingExtraError("the ranker xgboost", package="xgboost", extra="trees") from error
    return xgboost
