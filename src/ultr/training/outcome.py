"""The stage `judge`: facts about the data of a run, its metrics by request, and changes of rankings, for reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from ultr.bias.after_click import trust_of
from ultr.bias.examination import Examination
from ultr.bias.identification import NORMAL
from ultr.checks.pitfalls import Pitfall
from ultr.datasets import DATASETS, GENERATED, load_dataset
from ultr.errors import DataError
from ultr.evaluation.comparing import (
    CONFIRMED,
    LOGGED_RANKING,
    PLAUSIBLE,
    Decision,
    RankerComparison,
    doubt_about,
    drawn,
    off_policy_values,
    plausible_estimators,
    tested_values,
)
from ultr.evaluation.importance import REPEATS, FeatureImportance, permutation_importance, rows_to_score, tree_gains
from ultr.evaluation.metrics import MAX_GRADE
from ultr.evaluation.off_policy import (
    OffPolicyModel,
    load_off_policy_model,
    request_metrics,
    widened_test,
)
from ultr.evaluation.scores import (
    LIKELIHOOD,
    OFF_POLICY,
    Mean,
    PairedTest,
    judging_metric,
    less_is_better,
    mean_with_interval,
    paired_test,
    ranks,
)
from ultr.log import Log
from ultr.log.labels import Label
from ultr.log.sampling import LogParts, sample_log
from ultr.log.shards import Shards, is_lists
from ultr.log.splits import as_texts, request_hashes
from ultr.log.table import by_position, by_segment, slot
from ultr.rankers.model import load_model
from ultr.training.calibrating import reliability
from ultr.training.combining import Ranker
from ultr.training.config import Config
from ultr.training.data import OUTCOME, USED, Data, Decisions, read_used, used_requests
from ultr.training.examining import VALUES, Examined, best_evaluation
from ultr.training.fitting import scores_of
from ultr.training.folder import read_config
from ultr.utils.arguments import Seed, checked
from ultr.utils.distributed import choose_device
from ultr.utils.files import atomic_path
from ultr.utils.jsonfiles import check_format, file_checksum, read_json, save_tensors, write_json

# --- Importance of features -------------------------------------------------------------------------------------------
# The importance of the features of a run, estimated on requests that it was not trained on.

SAVED = 20  # most features in the outcome of a run


@checked
def feature_importance(
    run: str | Path,
    log: Log,
    *,
    metric: str | None = None,
    rows: int | None = None,
    repeats: int = REPEATS,
    seed: Seed = 0,
) -> list[FeatureImportance]:
    """Return how much a metric of a run falls if a feature is permuted, the most important feature first.

    The log must have requests that the run was not trained on. The default metric is the selection metric of the run:
    without true labels, it is estimated off policy from the feedback. At most about `rows` rows of random requests are
    used; by default as many as take seconds. Trees also have the gain of each feature.
    """
    if repeats < 1 or (rows is not None and rows < 1):
        raise DataError("'rows' and 'repeats' must be at least 1", got=f"{rows} and {repeats}")
    run = Path(run)
    model, metric = load_model(run), metric or read_config(run).selection
    log = model.view(log)
    log, segments = by_segment(log) if Decisions.load(run).segment else (log, ())
    options: dict[str, Any] = {"label": model.label, "model": load_off_policy_model(run / VALUES), "segments": segments}
    return _importance(metric, log, model.ranker, options, rows=rows, repeats=repeats, seed=seed)


def importance_of_run(config: Config, data: Data, ranker: nn.Module, values: OffPolicyModel | None) -> dict[str, Any]:
    """Return the importance of features on validation requests, for the outcome of a run; empty if it is not estimated.

    It is estimated for logs. Runs with simulated users are many, and nobody looks at their features.
    """
    if config.users is not None or not data.validation.feature_names:
        return {}
    options: dict[str, Any] = {"label": data.label, "model": values, "segments": data.segments}
    found = _importance(config.selection, data.validation, ranker, options, most=SAVED)
    return {"metric": config.selection, "features": [asdict(each) for each in found]}


def _importance(
    metric: str,
    log: Log,
    ranker: nn.Module,
    options: Mapping[str, Any],
    *,
    rows: int | None = None,
    repeats: int = REPEATS,
    seed: int = 0,
    most: int | None = None,
) -> list[FeatureImportance]:
    """Return the importance of features; `options` are those of `request_metrics`."""
    part = sample_log(log, rows or rows_to_score(len(log.feature_names), repeats), seed=seed)
    sign = -1 if less_is_better(metric) else 1
    metrics = request_metrics(part, [metric], keep=True, **options)
    return permutation_importance(
        part,
        lambda features: scores_of(ranker, features),
        lambda scores: sign * metrics(scores)[metric],
        gains=tree_gains(ranker, len(log.feature_names)),
        repeats=repeats,
        seed=seed,
        most=most,
    )


# --- Outcome ----------------------------------------------------------------------------------------------------------

FORMAT = 1
REQUESTS = "requests.parquet"  # file of the outcome of a run
THE_RUN = "the run"
CHOSE_STEP = "these requests chose the best step, so the value of the run is too high"
LOGGED = "logged "  # prefix of the metrics of the logged ranking
SHOWN_POSITIONS = 50  # statistics by position cover only the first positions
DEEPEST = 20  # moves between ranks are counted for the ranks from 1 to this one
COMPARED_ITEMS = 50  # items of a request whose order is compared, from the top of its logged ranking
PAIRS_AT_ONCE = 1 << 24  # pairs of items that are compared at once, which limits the memory
EXAMPLES = {"changed most": 3, "changed typically": 3, "changed least": 2}  # kind of example -> requests
EXAMPLE_ITEMS = 20  # largest number of items of an example


@dataclass(frozen=True, eq=False)
class RunOutcome:
    """The outcome of a run: facts about its data, and metrics of the new and the logged ranking of each request."""

    about: Mapping[str, Any]
    requests: list[str]
    weights: np.ndarray
    agreement: np.ndarray  # Kendall's τ between the logged ranking and the new one; NaN for requests with one item
    results: Mapping[str, np.ndarray]  # metric -> value per request; `LOGGED` + metric: of the logged ranking
    used: Mapping[str, np.ndarray] | None = None  # hashes of the requests that it `trained` on and was `selected` on

    def mean(self, name: str) -> Mean:
        """Return the mean of a metric, a key of `results`, with its interval."""
        known = self.about["means"].get(name)
        return mean_with_interval(self.results[name], self.weights) if known is None else Mean(**known)

    def test(self, name: str, other: RunOutcome, other_name: str) -> PairedTest:
        """Return a paired test of a metric against one of the same requests, of this outcome or of another run's.

        Two runs may have different estimates of examination, so that of two runs has the errors of both.
        """
        if other is self and other_name == LOGGED + name and name in self.about["against_logged"]:
            return PairedTest(**self.about["against_logged"][name])
        test = paired_test(self.results[name], other.results[other_name], self.weights)
        more = np.sqrt(self._more_than_requests(name) + other._more_than_requests(other_name)) / NORMAL
        return test if not more else widened_test(test, test.difference - more)

    def _more_than_requests(self, name: str) -> float:
        """Return the square of the half-width of an interval, without the part that is the error of the requests."""
        whole, part = self.mean(name), mean_with_interval(self.results[name], self.weights)
        return max(0.0, (whole.high - whole.low) ** 2 - (part.high - part.low) ** 2) / 4

    @property
    def confirmed(self) -> bool:
        """Whether chance or the user confirms the examination of off-policy metrics."""
        return bool(self.about["confirmed"])

    def decision(self, metric: str) -> Decision | None:
        """Return what to do with the ranker instead of the logged ranking, by an off-policy metric."""
        found = self.about["decisions"].get(metric)
        return None if found is None else Decision(**found)

    @property
    def calibration(self) -> Mapping[str, Any] | None:
        """How far the expected feedback is off on the requests that judge the run; None if it is not calibrated."""
        found: Mapping[str, Any] | None = self.about.get("calibration")
        return found if found is not None and found["error"] is not None else None

    @property
    def split(self) -> str:
        """Which requests judge the run: test, or validation if there are none, which chose its step."""
        return str(self.about["split"]["name"])


def judge(
    config: Config,
    data: Data,
    ranker: Ranker,
    examined: Examined,
    findings: Sequence[Pitfall],
    out: Path,
    *,
    compared: bool = False,
) -> None:
    """Evaluate the ranker of a run and the logged ranking on each test request, and write the outcome.

    Without test requests, such as with simulated users, it is that of the validation requests, which chose the step.
    The importance of features is not estimated for runs that are `compared`: they are many.
    """
    log = data.validation if data.test is None else data.test
    scores = ranker.scores if data.test is None else scores_of(ranker.ranker, log.features)
    logged, found = data.logged_scores(log), ranker.calibration
    values, chosen = examined.values, [] if config.selection == LIKELIHOOD else [config.selection]
    metrics = list(dict.fromkeys((judging_metric(config.selection), *chosen)))
    if log.relevance is not None and log.relevance.max() <= MAX_GRADE:
        metrics += [name for name in ("ndcg@10", *(("reward@10",) if data.user else ())) if name not in metrics]

    evaluate = request_metrics(
        log,
        metrics,
        user=data.user,
        label=data.label,
        model=values,
        segments=data.segments,
        device=choose_device(config.machine.device),
    )
    weights = np.ones(len(log)) if log.weights is None else log.weights.astype(np.float64)
    columns: dict[str, Any] = {"request": as_texts(log.request_ids), "weight": weights, **evaluate(scores)}
    about: dict[str, Any] = {
        "format": FORMAT,
        "data": _facts(data),
        "split": {"name": "validation" if data.test is None else "test", "requests": len(log), "rows": log.rows},
        "metrics": metrics,
        **_off_policy(config, data, log, scores, logged, metrics, examined, compared=compared),
        "calibration": None if found is None else reliability(found, scores, log, Label(data.label), data.segments),
        "importance": {} if compared else importance_of_run(config, data, ranker.ranker, values),
        "warnings": [asdict(finding) for finding in findings],
    }
    if logged is not None:
        columns |= {LOGGED + name: values for name, values in evaluate(logged).items()}
        before, after = ranks(log, logged), ranks(log, scores)
        columns["agreement"] = agreements(log, before, after)
        about["moves"] = _moves(before, after)
        about["examples"] = _examples(data.label, log, scores, before, after, columns["agreement"])
    with atomic_path(out / OUTCOME, overwrite=True, folder=True) as folder:
        pq.write_table(pa.table(columns), folder / REQUESTS)
        if data.stream is None:  # streamed requests are not in memory
            used = {"trained": data.train, "selected": data.validation}
            save_tensors(
                folder / USED, {name: torch.from_numpy(np.unique(request_hashes(log))) for name, log in used.items()}
            )
        write_json(folder / "outcome.json", {**about, "sum": file_checksum(folder / REQUESTS)})


def _off_policy(
    config: Config,
    data: Data,
    log: Log,
    scores: np.ndarray,
    logged: np.ndarray | None,
    metrics: Sequence[str],
    examined: Examined,
    *,
    compared: bool,
) -> dict[str, Any]:
    """Return the means of off-policy metrics, with tests against the logged ranking and what these decide.

    Intervals have the error of θ; metrics by request have the error of the requests only.
    """
    means, tests, decisions = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    model, examination = examined.values, examined.examination
    metrics = [metric for metric in metrics if metric.startswith(OFF_POLICY)]
    if model is None or not metrics:
        return {"means": means, "against_logged": tests, "decisions": decisions, "confirmed": False}
    theta, examination, doubt = evidence_of(data, log, model, examination, compared=compared)
    confirmed = doubt == CONFIRMED
    for metric in metrics:
        estimators = plausible_estimators(
            log,
            metric,
            theta,
            model.direct(log),
            draws=drawn(examination, theta),
            doubt=doubt,
            trust=trust_of(model.actions, theta),
            label=data.label,
            device=choose_device(config.machine.device),
        )
        rankers = {THE_RUN: scores} if logged is None else {LOGGED_RANKING: logged, THE_RUN: scores}
        found, paired = off_policy_values(estimators, rankers, metric, next(iter(rankers)))
        means[metric] = asdict(found[THE_RUN].mean)
        if logged is None:
            continue
        values = tested_values(found, paired, metric, LOGGED_RANKING)
        means[LOGGED + metric] = asdict(found[LOGGED_RANKING].mean)
        if (against := values[THE_RUN].difference) is not None:
            tests[metric] = asdict(against)
        comparison = RankerComparison(
            {name: {metric: value} for name, value in values.items()},
            LOGGED_RANKING,
            len(log),
            evidence=examination.source,
            confirmed=confirmed,
            chosen_on=CHOSE_STEP if data.test is None else None,
        )
        if (decision := comparison.decision(THE_RUN)) is not None:
            decisions[metric] = asdict(decision)
    return {"means": means, "against_logged": tests, "decisions": decisions, "confirmed": confirmed}


def evidence_of(
    data: Data, log: Log, model: OffPolicyModel, examination: Examination | None, *, compared: bool = False
) -> tuple[dict[int, float], Examination, int]:
    """Return θ by position id of a log, the examination that it comes from, and the doubt about it."""
    theta = model.theta_of(np.unique(log.shown_positions("an off-policy metric")).tolist(), data.segments)
    if examination is None:  # of users without bias
        examination = replace(Examination.known(theta), evidence="strata", source="features")
    if data.feeding_user is None and not compared:
        return theta, *doubt_about(data.train, examination, model, label=data.label, segments=data.segments)
    return theta, examination, CONFIRMED if examination.confirmed else PLAUSIBLE


def read_outcome(run: Path) -> RunOutcome | None:
    """Read the outcome of a run; return None for a run that is not finished."""
    folder = run / OUTCOME
    if not folder.is_dir():
        return None
    about = read_json(folder / "outcome.json")
    try:
        check_format(about, FORMAT, what="the outcome of the run", where=folder, hint="train again")
        if "sum" in about and file_checksum(folder / REQUESTS) != about["sum"]:
            what = "the file has changed since it was written"
            raise DataError(what, where=folder / REQUESTS, hint="train again")
        table = pq.read_table(folder / REQUESTS)
        results = {
            name: table[name].to_numpy()
            for metric in about["metrics"]
            for name in (metric, LOGGED + metric)
            if name in table.column_names
        }
        agreement = table["agreement"].to_numpy() if "agreement" in table.column_names else np.full(len(table), np.nan)
        ids, weights = table["request"].to_pylist(), table["weight"].to_numpy()
        return RunOutcome(about, ids, weights, agreement, results, read_used(run))
    except (KeyError, TypeError, OSError, pa.ArrowException) as error:
        what = f"the outcome of the run cannot be read ({error})"
        raise DataError(what, where=folder, hint="train again") from error


def value_of_run(run: Path) -> tuple[str, float, int]:
    """Return the metric that judges a finished run, its value for the saved model, and the step with the best one.

    The value is that of the requests that judge the run, and differs from that of the step.
    """
    selection, line = best_evaluation(run)
    outcome = read_outcome(run)
    name = judging_metric(selection)
    if outcome is None or name not in outcome.results:
        return selection, float(line[selection]), int(line["step"])
    return name, float(np.average(outcome.results[name], weights=outcome.weights)), int(line["step"])


# --- The data ---------------------------------------------------------------------------------------------------------


def _facts(data: Data) -> dict[str, Any]:
    log = data.train
    facts: dict[str, Any] = {
        "fingerprint": data.fingerprint,
        "requests": len(log),
        "rows": log.rows,
        "sample": data.stream is not None,  # these facts are of a sample of the training lists
        "features": len(log.feature_names),
        "items": {"least": int(log.lengths.min()), "mean": float(log.lengths.mean()), "most": int(log.lengths.max())},
        "fresh_feedback": data.feeding_user is not None,
    }
    if log.positions is not None:
        feedback = by_position(log)
        first = slice(SHOWN_POSITIONS)
        facts["by_position"] = {
            "positions": [slot(k, data.segments) for k in feedback.positions[first].tolist()],
            "impressions": feedback.impressions[first].tolist(),
            "rates": {name: values[first].tolist() for name, values in feedback.rates.items()},
            "means": {name: values[first].tolist() for name, values in feedback.means.items()},
        }
        if data.user is not None:
            facts["true_theta"] = data.user.theta(torch.from_numpy(feedback.positions[first])).tolist()
    return facts


# --- Changes of the ranking -------------------------------------------------------------------------------------------


def agreements(log: Log, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return Kendall's τ between the ranks `before` and `after` for each request, over the first `COMPARED_ITEMS`."""
    tau = np.full(len(log), np.nan)
    by_rank = np.lexsort((before, log.request_of_row))
    after = after[by_rank]
    for length in np.unique(log.lengths):
        requests, items = np.flatnonzero(log.lengths == length), min(int(length), COMPARED_ITEMS)
        if items < 2:
            continue
        upper = np.triu(np.ones((items, items), bool), 1)
        for part in np.array_split(requests, -(-len(requests) * items**2 // PAIRS_AT_ONCE)):
            new = after[log.offsets[part][:, None] + np.arange(items)]
            same_order = ((new[:, :, None] < new[:, None, :]) & upper).sum((1, 2))
            tau[part] = 4 * same_order / (items * (items - 1)) - 1
    return tau


def _moves(before: np.ndarray, after: np.ndarray) -> dict[str, Any]:
    """Return, for each logged rank, the share of its items at each new rank; ranks after `DEEPEST` count as one."""
    size = min(DEEPEST, int(before.max()) + 1)
    from_, to = np.minimum(before, size), np.minimum(after, size)
    counts = np.bincount(from_ * (size + 1) + to, minlength=(size + 1) ** 2).reshape(size + 1, size + 1)
    shares = counts / np.maximum(1, counts.sum(1, keepdims=True))
    return {
        "deepest": size,
        "shares": np.round(shares[:size], 4).tolist(),
        "first_kept": float((after[before == 0] == 0).mean()),
    }


def _examples(
    label: str, log: Log, scores: np.ndarray, before: np.ndarray, after: np.ndarray, agreement: np.ndarray
) -> list[dict[str, Any]]:
    """Return example requests for a report, with the logged and the new rank of each item."""
    try:
        labels = np.asarray(Label(label)(log.actions)) if log.actions else None
    except DataError:
        labels = None
    examples = []
    for request, why in _example_requests(agreement):
        rows = np.arange(log.offsets[request], log.offsets[request + 1])
        rows = rows[np.argsort(after[rows])][:EXAMPLE_ITEMS]
        examples.append(
            {
                "request": str(log.request_ids[request].as_py())[:200],
                "why": why,
                "agreement": round(float(agreement[request]), 3),
                "items": [
                    {
                        "item": str(
                            row - log.offsets[request] + 1 if log.item_ids is None else log.item_ids[row].as_py()
                        )[:200],
                        "before": int(before[row]) + 1,
                        "after": int(after[row]) + 1,
                        "score": float(scores[row]),
                        **({} if labels is None else {"label": float(labels[row])}),
                        **({} if log.relevance is None else {"relevance": float(log.relevance[row])}),
                    }
                    for row in rows.tolist()
                ],
            }
        )
    return examples


def _example_requests(agreement: np.ndarray) -> list[tuple[int, str]]:
    """Return (request index, kind) of requests that changed most, typically (near the median) and least."""
    order = np.argsort(agreement, kind="stable")[: int(np.isfinite(agreement).sum())]
    middle = max(0, len(order) // 2 - EXAMPLES["changed typically"] // 2)
    starts = {"changed most": 0, "changed typically": middle, "changed least": len(order) - EXAMPLES["changed least"]}
    reasons: dict[int, str] = {}
    for why, start in starts.items():
        for request in order[max(0, start) : max(0, start) + EXAMPLES[why]].tolist():
            reasons.setdefault(request, why)
    return list(reasons.items())


# --- Test requests ----------------------------------------------------------------------------------------------------
# The requests of a log on which several runs can be compared: those that no run was trained on, or chose its step by.


@dataclass(frozen=True)
class Split:
    """The split of a data set or of prepared lists that is evaluated, and the fingerprint of the data."""

    fingerprint: str
    name: str


def split_of(data: str, name: str, data_dir: str | Path | None) -> Split | None:
    """Return the split of data that has splits; None for a log."""
    if is_lists(data):
        return Split(Shards(data).fingerprint, name)
    if data in GENERATED or data in DATASETS:
        return Split(load_dataset(data, data_dir=data_dir).fingerprint, name)
    return None


@dataclass(frozen=True, eq=False)
class FreshRequests:
    """The requests of a log on which rankers are compared."""

    mask: np.ndarray  # [requests]
    warnings: list[str]
    chosen_on: str | None = None  # why they cannot judge: they trained a run, or chose its step


def fresh_requests(runs: Mapping[str, tuple[Path, Log | LogParts]], split: Split | None) -> FreshRequests:
    """Return the requests of a log on which rankers can be compared.

    `runs` maps the name of a run to its folder and to the log, whole or in parts, with the features of its model. They
    are those that no run was trained on, and that chose nothing; without such requests, those that only chose a step,
    or else all: these cannot judge.
    """
    count = len(next(iter(runs.values()))[1])
    trained, chose, warnings = np.zeros(count, bool), np.zeros(count, bool), list[str]()
    for name, (folder, log) in runs.items():
        for_training, for_choice = _masks(folder, log, split)
        if for_training is None or for_choice is None:
            warnings.append(
                f"{name} does not record the requests it was trained on, because its lists were streamed. If it was "
                "trained on these requests, its value is too high."
            )
            continue
        trained |= for_training
        chose |= for_choice
    fresh = ~(trained | chose)
    if not fresh.any():
        which = "trained the run" if trained.all() else "chose the best step of a run"
        why = f"the requests {which}, so its value is too high; pass others with --data"
        return FreshRequests(trained if trained.all() else ~trained, warnings, why)
    if not fresh.all():
        used = f"{count - int(fresh.sum()):,} of the {count:,} requests trained a run or chose its step."
        warnings.append(f"{used} All rankers are evaluated on the other {int(fresh.sum()):,} requests.")
    return FreshRequests(fresh, warnings)


def _masks(folder: Path, log: Log | LogParts, split: Split | None) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return masks of the requests that a run was trained on, and that selected its best step; None if not known."""
    outcome = read_outcome(folder)
    if split is not None and outcome is not None and outcome.about["data"]["fingerprint"] == split.fingerprint:
        return np.full(len(log), split.name == "train"), np.full(len(log), split.name == "validation")
    return used_requests(folder, log) or (None, None)
