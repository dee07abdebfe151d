"""The stage `check`: look for problems of the data before training, such as leaks, bots and lists of one item."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ultr.checks.leaks import find_leaks, find_noisy_leaks
from ultr.checks.pitfalls import CHECKS, TRAINING_CHECKS, Check, Pitfall, find_bots, find_pitfalls
from ultr.errors import DataError
from ultr.log import Log
from ultr.log.build import DAY
from ultr.log.cleaning import SUSPICIOUS_FILE
from ultr.log.labels import Label
from ultr.log.sampling import sample_log
from ultr.methods import learns_alone
from ultr.training.config import Config
from ultr.training.data import Data

CHECKED_ROWS, CHECKED_NUMBERS = 50_000, 1_000_000  # most rows, and rows times features, whose features are checked
COUNTED_ROWS = 1_000_000  # most rows in which bots and repeated items are looked for
EXPECTED_CLICKS = 20  # rows with feedback that a day without any should have, to be a finding
SHOWN_DAYS = 3
ONE_ITEM = (
    "a request with one item shows how good the item is, but not which of two items is better: pointwise methods learn "
    "from it, and pairwise and listwise methods do not"
)


def check(config: Config, data: Data) -> list[Pitfall]:
    """Return the problems of the data of a run; raise DataError for features that follow feedback.

    With `allow_leaks`, such features are only a finding. Samples are checked, so this takes about a second.
    """
    log = data.train
    pitfalls = [*_one_item(log), *_without_feedback(config, data)]
    if data.suspicious is not None:
        what = f"{len(data.suspicious):,} requests with impossible click rates are left out"
        pitfalls.append(Pitfall("suspicious requests", what, f"their ids are written to {SUSPICIOUS_FILE} in the run"))
    if config.users is not None or config.simulation.learn_from != "feedback" or log.positions is None:
        return pitfalls
    checks = [check for check in TRAINING_CHECKS if data.suspicious is None or check is not find_bots]
    clear, others = find_problems(log, Label(data.label), checks)
    if clear and not config.data.allow_leaks:
        what = f"features follow the feedback on their item: {clear[0].what}"
        hint = f"{clear[0].hint}; to train with them, pass --set allow_leaks=true (allow_leaks=True)"
        raise DataError(what, where=config.data.source or None, hint=hint)
    known = [name for found in (*clear, *others) for name in found.features]
    return [*pitfalls, *clear, *others, *find_noisy_leaks(log, known)]


def find_problems(log: Log, label: Label, checks: Iterable[Check] = CHECKS) -> tuple[list[Pitfall], list[Pitfall]]:
    """Return features of a log that clearly follow its feedback, and all other problems, both from samples of it."""
    clear, likely = find_leaks(log)
    if log.positions is None:
        return clear, likely
    counted = sample_log(log.without_features(), COUNTED_ROWS)
    clicked = np.asarray(label(counted.actions)) > 0
    rows = min(CHECKED_ROWS, CHECKED_NUMBERS // max(1, len(log.feature_names)))
    return clear, [*likely, *find_pitfalls(counted, clicked, sample=sample_log(log, rows), checks=checks)]


def check_pairs(config: Config, kind: str, log: Log) -> None:
    """Raise DataError if all requests have one item and the method learns from the order of items only."""
    method = config.method.name
    if log.lengths.max(initial=0) == 1 and not learns_alone(method, config.method.options, ranker=kind):
        hint = "use a request id that all items shown together share, or --method direct or pointwise"
        what = f"all {len(log):,} requests have one item, so '{method}' has no order to learn from: {ONE_ITEM}"
        raise DataError(what, where=config.data.source or None, hint=hint)


def _without_feedback(config: Config, data: Data) -> list[Pitfall]:
    """Return a finding if a part of the requests, or a day, has no feedback at all."""
    if config.users is not None or config.simulation.learn_from != "feedback":
        return []
    label = Label(data.label)
    found = {"train": data.train, "validation": data.validation, "test": data.test}
    logs = {name: log for name, log in found.items() if log is not None and len(log)}
    positive = {name: np.asarray(label(log.actions)) > 0 for name, log in logs.items()}
    hint = "the feedback of the last days may still be missing: leave them out with --where, or correct the log"
    silent_parts = [name for name in logs if not positive[name].any()]
    if silent_parts:
        parts = " and ".join(f"{len(logs[name]):,} {name}" for name in silent_parts)
        return [Pitfall("no feedback", f"the label is 0 in all {parts} requests, which cannot select or test", hint)]
    if not all("time" in log.context for log in logs.values()):
        return []
    times = np.concatenate([np.asarray(log.context["time"].to_numpy(zero_copy_only=False)) for log in logs.values()])
    clicked = [np.add.reduceat(positive[name], log.offsets[:-1], dtype=float) for name, log in logs.items()]
    days, day = np.unique(times // DAY, return_inverse=True)
    requests, clicks = np.bincount(day), np.bincount(day, np.concatenate(clicked))
    silent = days[(clicks == 0) & (requests * clicks.sum() / requests.sum() > EXPECTED_CLICKS)]
    if not len(silent):
        return []
    texts = [f"{np.datetime64(int(each), 'D')}" for each in silent[:SHOWN_DAYS].tolist()]
    more = f" and {len(silent) - SHOWN_DAYS} more" if len(silent) > SHOWN_DAYS else ""
    return [Pitfall("no feedback", f"the label is 0 in all requests of {', '.join(texts)}{more}", hint)]


def _one_item(log: Log) -> list[Pitfall]:
    share = float((log.lengths == 1).mean())
    if not share:
        return []
    what = f"{share:.1%} of the requests have one item: {ONE_ITEM}"
    hint = "check that the items of a request share its id"
    return [Pitfall("requests with one item", what, hint)]
