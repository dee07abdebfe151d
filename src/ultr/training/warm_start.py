"""Start a run from the ranker of another run: weights matched by feature name and category, or trees to extend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from ultr.errors import DataError, OptionError
from ultr.log import Log
from ultr.methods import Method
from ultr.rankers import Synthesised
from ultr.rankers.blend import Blend, Part
from ultr.rankers.boosters import Booster, TreeRanker
from ultr.rankers.matching import extended_log, load_matched_weights, match_features
from ultr.rankers.model import load_model
from ultr.training.data import RunData

HINT = "pass --warm-start with a run that has the same --method, --label, --ranker and --hidden"


def start_from(method: Method, run: Path, log: Log) -> dict[str, Tensor]:
    """Give the ranker of a method, whose encoders are fitted to the log, the weights and normalisation of a run.

    It then has the scores of the run. Return its weights.
    """
    model, ranker = load_model(run), method.serving()
    if isinstance(model.ranker, TreeRanker | Blend):
        raise OptionError("a network cannot start from a run of trees", got=run, hint=HINT)
    if type(model.ranker) is not type(ranker) or _actions(model.ranker) != _actions(ranker):
        raise DataError("the ranker of this run is of another kind, or predicts other actions", where=run, hint=HINT)
    try:
        match, weights = match_features(model, log), model.ranker.state_dict()
        load_matched_weights(ranker, weights, match, indicators=model.indicators or ())
    except (KeyError, ValueError) as error:
        raise DataError("the ranker of this run has weights of other shapes", where=run, hint=HINT) from error
    return {name: tensor.detach().clone() for name, tensor in ranker.state_dict().items()}


def start_trees(ranker: str, run: Path) -> Booster | None:
    """Return the trees of a run that a run of trees extends; None if its ranker has only trees of its bias model."""
    found = load_model(run).ranker
    first = found.parts[0] if isinstance(found, Blend) else Part(found, "")
    if not isinstance(first.ranker, TreeRanker):
        raise OptionError("trees cannot start from a run of a network", got=run, hint=HINT)
    if first.link != "identity":
        return None
    if ranker != first.ranker.booster.LIBRARY:
        library = first.ranker.booster.LIBRARY
        raise OptionError(f"the trees of this run are of {library}", got=run, hint=f"pass --ranker {library}")
    return first.ranker.booster


def with_codes_of(run: Path, run_data: RunData) -> RunData:
    """Return the data of a run with the features and the codes of categories of the run that its trees extend."""
    model = load_model(run)
    test = None if run_data.test is None else extended_log(model, run_data.test)
    train, validation = (extended_log(model, log) for log in (run_data.train, run_data.validation))
    return replace(run_data, train=train, validation=validation, test=test)


def _actions(ranker: object) -> tuple[tuple[str, ...], ...] | None:
    return (tuple(ranker.label.actions), ranker.binary) if isinstance(ranker, Synthesised) else None
