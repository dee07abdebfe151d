"""Start a run from the ranker of another run: weights and normalisation, matched by feature name and category."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from ultr.errors import DataError, OptionError
from ultr.log import Log
from ultr.methods import Method
from ultr.rankers import Synthesised
from ultr.rankers.boosters import TreeRanker
from ultr.rankers.matching import load_matched_weights, match_features
from ultr.rankers.model import load_model

HINT = "pass --warm-start with a run that has the same --method, --label, --ranker and --hidden"


def start_from(method: Method, run: Path, log: Log) -> dict[str, Tensor]:
    """Give the ranker of a method, whose encoders are fitted to the log, the weights and normalisation of a run.

    It then has the scores of the run. Return its weights.
    """
    model, ranker = load_model(run), method.serving()
    if isinstance(model.ranker, TreeRanker):
        raise OptionError("a network cannot start from a run of trees", got=run, hint=HINT)
    if type(model.ranker) is not type(ranker) or _actions(model.ranker) != _actions(ranker):
        raise DataError("the ranker of this run is of another kind, or predicts other actions", where=run, hint=HINT)
    try:
        match, weights = match_features(model, log), model.ranker.state_dict()
        load_matched_weights(ranker, weights, match, indicators=model.indicators or ())
    except (KeyError, ValueError) as error:
        raise DataError("the ranker of this run has weights of other shapes", where=run, hint=HINT) from error
    return {name: tensor.detach().clone() for name, tensor in ranker.state_dict().items()}


def _actions(ranker: object) -> tuple[tuple[str, ...], ...] | None:
    return (tuple(ranker.label.actions), ranker.binary) if isinstance(ranker, Synthesised) else None
