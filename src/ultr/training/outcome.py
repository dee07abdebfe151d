"""The stage `judge`: facts about the data of a run, its metrics by request, and changes of rankings, for reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from ultr.checks.pitfalls import Pitfall
from ultr.datasets import DATASETS, load_dataset
from ultr.errors import DataError
from ultr.evaluation.importance import REPEATS, FeatureImportance, permutation_importance, rows_to_score, tree_gains
from ultr.evaluation.metrics import MAX_GRADE
from ultr.evaluation.off_policy import (
    OffPolicyModel,
    evaluate_requests,
    load_off_policy_model,
    request_metrics,
    widened_mean,
    widened_test,
)
from ultr.evaluation.scores import OFF_POLICY, Mean, PairedTest, mean_with_interval, paired_test
from ultr.log import Log
from ultr.log.labels import Label
from ultr.log.sampling import LogParts, sample_log
from ultr.log.shards import Shards, is_lists
from ultr.log.splits import as_texts, request_hashes
from ultr.log.table import by_position, by_segment, slot
from ultr.rankers import score_rows
from ultr.rankers.boosters import TreeRanker
from ultr.rankers.model import load_model
from ultr.training.combining import Ranker
from ultr.training.config import Config
from ultr.training.data import OUTCOME, USED, Data, Decisions, read_used, used_requests
from ultr.training.examining import VALUES, best_evaluation, less_is_better
from ultr.training.folder import read_config
from ultr.utils.arguments import Seed, checked
from ultr.utils.distributed import choose_device
from ultr.utils.files import atomic_path
from ultr.utils.jsonfiles import check_format, file_checksum, read_json, write_json
from ultr.utils.tensors import save_tensors

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
    run = Path(run)
    model, config = load_model(run), read_config(run)
    log = model.view(log)
    log, segments = by_segment(log) if Decisions.load(run).segment else (log, ())
    options: dict[str, Any] = {"label": model.label, "model": load_off_policy_model(run / VALUES), "segments": segments}
    return _importance(config, log, model.ranker, options, metric=metric, rows=rows, repeats=repeats, seed=seed)


def importance_of_run(config: Config, data: Data, ranker: nn.Module, values: OffPolicyModel | None) -> dict[str, Any]:
    """Return the importance of features on validation requests, for the outcome of a run; empty if it is not estimated.

    It is estimated for logs. Runs of a comparison and of simulated users are many, and nobody looks at their features.
    """
    if config.users is not None or config.data.test or not data.validation.feature_names:
        return {}
    options: dict[str, Any] = {"label": data.label, "model": values, "segments": data.segments}
    found = _importance(config, data.validation, ranker, options, most=SAVED)
    return {"metric": config.selection, "features": [asdict(each) for each in found]}


def _importance(
    config: Config,
    log: Log,
    ranker: nn.Module,
    options: Mapping[str, Any],
    *,
    metric: str | None = None,
    rows: int | None = None,
    repeats: int = REPEATS,
    seed: int = 0,
    most: int | None = None,
) -> list[FeatureImportance]:
    """Return the importance of features; `options` are those of `request_metrics`."""
    if repeats < 1 or (rows is not None and rows < 1):
        raise DataError("'rows' and 'repeats' must be at least 1", got=f"{rows} and {repeats}")
    chosen = metric or config.selection
    part = sample_log(log, rows or rows_to_score(len(log.feature_names), repeats), seed=seed)
    device = next((parameter.device for parameter in ranker.parameters()), "cpu")
    sign = -1 if less_is_better(chosen) else 1

    metrics = request_metrics(part, [chosen], keep=True, **options)

    gains = tree_gains(ranker, len(log.feature_names)) if isinstance(ranker, TreeRanker) else None
    ranker.eval()
    return permutation_importance(
        part,
        lambda features: score_rows(ranker, features, device=device),
        lambda scores: sign * metrics(scores)[chosen],
        gains=gains,
        repeats=repeats,
        seed=seed,
        most=most,
    )


# --- Outcome ----------------------------------------------------------------------------------------------------------

FORMAT = 1
FOLDER, REQUESTS = OUTCOME, "requests.parquet"  # folder of the outcome in a run, and a file in it
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
        mean = mean_with_interval(self.results[name], self.weights)
        without = self.about.get("unclipped", {}).get(name)
        return mean if without is None else widened_mean(mean, without)

    def test(self, name: str, other: RunOutcome, other_name: str) -> PairedTest:
        """Return a paired test of a metric against one of the same requests, of this outcome or of another run's."""
        test = paired_test(self.results[name], other.results[other_name], self.weights)
        a, b = self.about.get("unclipped", {}).get(name), other.about.get("unclipped", {}).get(other_name)
        return test if a is None or b is None else widened_test(test, a - b)


def judge(
    config: Config,
    data: Data,
    ranker: Ranker,
    values: OffPolicyModel | None,
    findings: Sequence[Pitfall],
    out: Path,
) -> None:
    """Evaluate the ranker of a run and the logged ranking on each validation request, and write the outcome."""
    scores = ranker.scores
    log, logged = data.validation, data.logged_scores()
    metrics = [config.selection]
    if log.relevance is not None and log.relevance.max() <= MAX_GRADE:
        metrics += [name for name in ("ndcg@10", *(("reward@10",) if data.user else ())) if name not in metrics]

    def evaluate(scores: np.ndarray) -> dict[str, np.ndarray]:
        return evaluate_requests(
            log,
            scores,
            metrics,
            user=data.user,
            label=data.label,
            model=values,
            segments=data.segments,
            device=choose_device(config.machine.device),
        )

    def unclipped(scores: np.ndarray) -> dict[str, float]:
        """Return off-policy metrics with weights that are not clipped, by which intervals are wider."""
        how: dict[str, Any] = {"label": data.label, "segments": data.segments}
        names = [name for name in metrics if name.startswith(OFF_POLICY)]
        return {} if values is None else {name: values.value(log, scores, name, **how).unclipped for name in names}

    columns: dict[str, Any] = {"request": as_texts(log.request_ids), "weight": _weights(log), **evaluate(scores)}
    about: dict[str, Any] = {
        "format": FORMAT,
        "data": _facts(data),
        "validation": {"requests": len(log), "rows": log.rows},
        "metrics": metrics,
        "unclipped": unclipped(scores),
        "importance": importance_of_run(config, data, ranker.ranker, values),
        "warnings": [asdict(finding) for finding in findings],
    }
    if logged is not None:
        columns |= {LOGGED + name: values for name, values in evaluate(logged).items()}
        about["unclipped"] |= {LOGGED + name: value for name, value in unclipped(logged).items()}
        before, after = ranks(log, logged), ranks(log, scores)
        columns["agreement"] = agreements(log, before, after)
        about["moves"] = _moves(before, after)
        about["examples"] = _examples(data.label, log, scores, before, after, columns["agreement"])
    with atomic_path(out / FOLDER, overwrite=True, folder=True) as folder:
        pq.write_table(pa.table(columns), folder / REQUESTS)
        if data.stream is None:  # streamed requests are not in memory
            save_tensors(folder / USED, {name: _hashes(log) for name, log in _used(data).items()})
        write_json(folder / "outcome.json", {**about, "sum": file_checksum(folder / REQUESTS)})


def read_outcome(run: Path) -> RunOutcome | None:
    """Read the outcome of a run; return None for a run that is not finished."""
    folder = run / FOLDER
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
    """Return the selection metric of a finished run, its value for the saved model, and the step with the best one.

    The value is that of the validation requests. It differs from that of the step if the model is a sum of rankers.
    """
    name, line = best_evaluation(run)
    outcome = read_outcome(run)
    if outcome is None or name not in outcome.results:
        return name, float(line[name]), int(line["step"])
    return name, float(np.average(outcome.results[name], weights=outcome.weights)), int(line["step"])


def _used(data: Data) -> dict[str, Log]:
    return {"trained": data.train, "selected": data.validation}


def _hashes(log: Log) -> torch.Tensor:
    return torch.from_numpy(np.unique(request_hashes(log)))


def _weights(log: Log) -> np.ndarray:
    return np.ones(len(log)) if log.weights is None else log.weights.astype(np.float64)


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


def ranks(log: Log, scores: np.ndarray) -> np.ndarray:
    """Return the rank of each row in its request: 0 for the highest score; rows with equal scores keep their order."""
    order = np.lexsort((-scores, log.request_of_row))
    rank = np.empty(log.rows, np.int64)
    rank[order] = np.arange(log.rows) - np.repeat(log.offsets[:-1], log.lengths)
    return rank


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
    label: str,
    log: Log,
    scores: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    agreement: np.ndarray,
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


# --- Requests that no run was trained on ------------------------------------------------------------------------------
# The requests of a log on which several runs can be compared: those that none of them was trained on.


@dataclass(frozen=True)
class Split:
    """The split of a data set or of prepared lists that is evaluated, and the fingerprint of the data."""

    fingerprint: str
    name: str


def split_of(data: str, name: str, data_dir: str | Path | None) -> Split | None:
    """Return the split of data that has splits; None for a log."""
    if is_lists(data):
        return Split(Shards(data).fingerprint, name)
    if data == "synthetic" or data in DATASETS:
        return Split(load_dataset(data, data_dir=data_dir).fingerprint, name)
    return None


def fresh_requests(
    runs: Mapping[str, tuple[Path, Log | LogParts]], split: Split | None, *, unselected: bool = False
) -> tuple[np.ndarray, list[str]]:
    """Return a mask of the requests of a log on which rankers can be compared, and warnings.

    `runs` maps the name of a run to its folder and to the log, whole or in parts, with the features of its model. The
    mask has the requests that no run was trained on, or all requests if there are none such. With `unselected`, those
    that selected the best step of a run are left out too, and there are no warnings about requests that are left out.
    """
    count = len(next(iter(runs.values()))[1])
    fresh, warnings, partly = np.ones(count, bool), [], []
    chosen_on: dict[str, np.ndarray] = {}
    for name, (folder, log) in runs.items():
        trained, selected = _masks(folder, log, split)
        if trained is None or selected is None:
            warnings.append(
                f"{name} does not record the requests it was trained on, because its lists were streamed. If it was "
                "trained on these requests, its value is too high."
            )
            continue
        if unselected:
            fresh &= ~(trained | selected)
            continue
        chosen_on[name] = selected
        if trained.any():
            fresh &= ~trained
            partly.append(f"{name} was trained on {int(trained.sum()):,} of the {count:,} requests.")
    if not fresh.any():
        hint = "pass requests that no run was trained on"
        warnings += [*partly, f"No other requests are left, so the values of the runs are too high; {hint}."]
        return np.ones(count, bool), warnings
    if partly:
        warnings += [*partly, f"All rankers are evaluated on the other {int(fresh.sum()):,} requests."]
    for name, selected in chosen_on.items():
        if both := int((selected & fresh).sum()):
            warnings.append(
                f"{both:,} of the test requests selected the best step of {name}, so its value is slightly too high."
            )
    return fresh, warnings


def _masks(folder: Path, log: Log | LogParts, split: Split | None) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return masks of the requests that a run was trained on, and that selected its best step; None if not known."""
    outcome = read_outcome(folder)
    if split is not None and outcome is not None and outcome.about["data"]["fingerprint"] == split.fingerprint:
        return np.full(len(log), split.name == "train"), np.full(len(log), split.name == "validation")
    return used_requests(folder, log) or (None, None)
