"""The outcome of a run, which reports show: facts about its data, metrics by request, and changes of rankings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ultr.errors import DataError
from ultr.evaluation.judge import Judge, evaluate_requests
from ultr.evaluation.metrics import MAX_GRADE
from ultr.evaluation.scores import OFF_POLICY, Mean, PairedTest, mean_with_interval, paired_test
from ultr.evaluation.widened import widened_mean, widened_test
from ultr.log import Log
from ultr.log.hashes import as_texts, request_hashes
from ultr.log.labels import Label
from ultr.log.segments import slot
from ultr.log.summary import by_position
from ultr.training.config import RunConfig
from ultr.training.data import RunData
from ultr.training.selection import best_evaluation
from ultr.training.used import OUTCOME, USED, read_used
from ultr.utils.devices import choose_device
from ultr.utils.files import atomic_path
from ultr.utils.jsonfiles import check_format, file_checksum, read_json, write_json
from ultr.utils.tensors import save_tensors

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


def write_outcome(
    config: RunConfig,
    run_data: RunData,
    scores: np.ndarray,
    judge: Judge | None,
    out: Path,
    *,
    importance: Mapping[str, Any] | None = None,
) -> None:
    """Evaluate `scores` (of the validation rows) and the logged ranking on each request, and write the outcome.

    `importance` is that of the features, from `importance_of_run`.
    """
    log, logged = run_data.validation, run_data.logged_scores()
    metrics = [config.selection]
    if log.relevance is not None and log.relevance.max() <= MAX_GRADE:
        metrics += [name for name in ("ndcg@10", *(("reward@10",) if run_data.user else ())) if name not in metrics]

    def evaluate(scores: np.ndarray) -> dict[str, np.ndarray]:
        return evaluate_requests(
            log,
            scores,
            metrics,
            user=run_data.user,
            label=config.label,
            judge=judge,
            segments=run_data.segments,
            device=choose_device(config.training.device),
        )

    def unclipped(scores: np.ndarray) -> dict[str, float]:
        """Return off-policy metrics with weights that are not clipped, by which intervals are wider."""
        how: dict[str, Any] = {"label": config.label, "segments": run_data.segments}
        names = [name for name in metrics if name.startswith(OFF_POLICY)]
        return {} if judge is None else {name: judge.value(log, scores, name, **how).unclipped for name in names}

    columns: dict[str, Any] = {"request": as_texts(log.request_ids), "weight": _weights(log), **evaluate(scores)}
    about: dict[str, Any] = {
        "format": FORMAT,
        "data": _facts(run_data),
        "validation": {"requests": len(log), "rows": log.rows},
        "metrics": metrics,
        "unclipped": unclipped(scores),
        "importance": importance or {},
        "warnings": [asdict(warning) for warning in run_data.warnings],
    }
    if logged is not None:
        columns |= {LOGGED + name: values for name, values in evaluate(logged).items()}
        about["unclipped"] |= {LOGGED + name: value for name, value in unclipped(logged).items()}
        before, after = ranks(log, logged), ranks(log, scores)
        columns["agreement"] = agreements(log, before, after)
        about["moves"] = _moves(before, after)
        about["examples"] = _examples(config, log, scores, before, after, columns["agreement"])
    with atomic_path(out / FOLDER, overwrite=True, folder=True) as folder:
        pq.write_table(pa.table(columns), folder / REQUESTS)
        if run_data.stream is None:  # streamed requests are not in memory
            save_tensors(folder / USED, {name: _hashes(log) for name, log in _used(run_data).items()})
        write_json(folder / "outcome.json", {**about, "sum": file_checksum(folder / REQUESTS)})


def read_outcome(run: Path) -> RunOutcome | None:
    """Read the outcome of a run; return None for runs without one (unfinished, or of an old version)."""
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


def _used(run_data: RunData) -> dict[str, Log]:
    return {"trained": run_data.train, "selected": run_data.validation}


def _hashes(log: Log) -> torch.Tensor:
    return torch.from_numpy(np.unique(request_hashes(log)))


def _weights(log: Log) -> np.ndarray:
    return np.ones(len(log)) if log.weights is None else log.weights.astype(np.float64)


# --- The data ---------------------------------------------------------------------------------------------------------


def _facts(run_data: RunData) -> dict[str, Any]:
    log = run_data.train
    facts: dict[str, Any] = {
        "fingerprint": run_data.fingerprint,
        "requests": len(log),
        "rows": log.rows,
        "sample": run_data.stream is not None,  # these facts are of a sample of the training lists
        "features": len(log.feature_names),
        "items": {"least": int(log.lengths.min()), "mean": float(log.lengths.mean()), "most": int(log.lengths.max())},
        "fresh_feedback": run_data.feeding_user is not None,
    }
    if log.positions is not None:
        feedback = by_position(log)
        first = slice(SHOWN_POSITIONS)
        facts["by_position"] = {
            "positions": [slot(k, run_data.segments) for k in feedback.positions[first].tolist()],
            "impressions": feedback.impressions[first].tolist(),
            "rates": {name: values[first].tolist() for name, values in feedback.rates.items()},
            "means": {name: values[first].tolist() for name, values in feedback.means.items()},
        }
        if run_data.user is not None:
            facts["true_theta"] = run_data.user.theta(torch.from_numpy(feedback.positions[first])).tolist()
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
    config: RunConfig,
    log: Log,
    scores: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    agreement: np.ndarray,
) -> list[dict[str, Any]]:
    """Return example requests for a report, with the logged and the new rank of each item."""
    try:
        labels = np.asarray(Label(config.label)(log.actions)) if log.actions else None
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
