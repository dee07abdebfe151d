"""Look for traps in the data of a run, before it trains: leaks, features of the old order, bots, lists of one item."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ultr.bias.leaks import find_leaks
from ultr.bias.pitfalls import TRAINING_CHECKS, Pitfall, find_bots, find_pitfalls
from ultr.errors import DataError
from ultr.log import Log
from ultr.log.labels import Label
from ultr.log.sampling import sample_log
from ultr.log.suspicious import SUSPICIOUS_FILE
from ultr.methods import learns_alone
from ultr.training.config import RunConfig
from ultr.training.data import RunData, load_run_data

CHECKED_ROWS, CHECKED_NUMBERS = 50_000, 1_000_000  # most rows, and rows times features, whose features are checked
COUNTED_ROWS = 1_000_000  # most rows in which bots and repeated items are looked for
ONE_ITEM = (
    "a request with one item shows how good the item is, but not which of two items is better: pointwise methods learn "
    "from it, and pairwise and listwise methods do not"
)


def find_traps(config: RunConfig, run_data: RunData) -> list[Pitfall]:
    """Return the warnings about the data of a run; raise DataError for features that follow feedback.

    With `config.allow_leaks`, such features are a warning. Samples are checked, so this takes about a second.
    """
    log = run_data.train
    check_pairs(config, log)
    pitfalls = _one_item(log)
    if run_data.suspicious is not None:
        what = f"{len(run_data.suspicious):,} requests with impossible click rates are left out"
        pitfalls.append(Pitfall("suspicious requests", what, f"their ids are written to {SUSPICIOUS_FILE} in the run"))
    if config.users is not None or config.learn_from != "feedback" or log.positions is None:
        return pitfalls
    clear, likely = find_leaks(log)
    if clear and not config.allow_leaks:
        what = f"features follow the feedback on their item: {clear[0].what}"
        hint = f"{clear[0].hint}; to train with them, pass --allow-leaks (allow_leaks=True)"
        raise DataError(what, where=config.data or None, hint=hint)
    counted = sample_log(log.without_features(), COUNTED_ROWS)
    clicked = np.asarray(Label(config.label)(counted.actions)) > 0
    checks = [check for check in TRAINING_CHECKS if run_data.suspicious is None or check is not find_bots]
    rows = min(CHECKED_ROWS, CHECKED_NUMBERS // max(1, len(log.feature_names)))
    found = find_pitfalls(counted, clicked, sample=sample_log(log, rows), checks=checks)
    return [*pitfalls, *clear, *likely, *found]


def traps_of_log(configs: Sequence[RunConfig]) -> list[Pitfall]:
    """Return `find_traps` of a log for runs of several methods; raise DataError if a method cannot learn from it."""
    run_data = load_run_data(configs[0])
    for config in configs:
        check_pairs(config, run_data.train)
    return find_traps(configs[0], run_data)


def check_pairs(config: RunConfig, log: Log) -> None:
    """Raise DataError if all requests have one item and the method learns from the order of items only."""
    if log.lengths.max(initial=0) == 1 and not learns_alone(config.method, ranker=config.ranker):
        hint = "use a request id that all items shown together share, or --method direct or pointwise"
        what = f"all {len(log):,} requests have one item, so '{config.method}' has no order to learn from: {ONE_ITEM}"
        raise DataError(what, where=config.data or None, hint=hint)


def _one_item(log: Log) -> list[Pitfall]:
    share = float((log.lengths == 1).mean())
    if not share:
        return []
    what = f"{share:.1%} of the requests have one item: {ONE_ITEM}"
    hint = "check that the items of a request share its id"
    return [Pitfall("requests with one item", what, hint)]
