"""What a finished run leaves to be looked at: its data, its validation requests, and rankings that changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ultr.checkpoint import read_json, write_json
from ultr.errors import DataError
from ultr.files import atomic_path
from ultr.formats import check_format
from ultr.judging import Judge, figures_of
from ultr.labels import Label
from ultr.log import Log
from ultr.log.segments import slot
from ultr.log.summary import by_position
from ultr.metrics import MAX_GRADE
from ultr.preparing import Prepared, RunConfig
from ultr.seals import checksum

FORMAT = 1
FOLDER, REQUESTS = "outcome", "requests.parquet"  # of a run
LOGGED = "logged "  # before a metric: of the ranking that was there before
MOST_POSITIONS = 50  # that are told one by one
DEEPEST = 20  # rank to which moves are counted
COMPARED_ITEMS = 50  # of a request, from the top of its logged ranking, whose order is compared
PAIRS_AT_ONCE = 1 << 24
EXAMPLES = {"changed most": 3, "changed as usual": 3, "changed least": 2}
EXAMPLE_ITEMS = 20


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a run left: facts of its data, and for each validation request the metrics of both rankings."""

    about: Mapping[str, Any]
    requests: list[str]
    weights: np.ndarray
    agreement: np.ndarray  # Kendall's τ between the logged ranking and the new one; NaN where there is nothing to order
    figures: Mapping[str, np.ndarray]  # by metric, and with `LOGGED` before it


def write_outcome(config: RunConfig, prepared: Prepared, scores: np.ndarray, judge: Judge | None, out: Path) -> None:
    """Judge the scores of validation request by request, beside the logged ranking, and write what came of it."""
    log, logged = prepared.validation, prepared.logged_scores()
    metrics = [config.selection]
    if log.relevance is not None and log.relevance.max() <= MAX_GRADE:
        metrics += [name for name in ("ndcg@10", *(("reward@10",) if prepared.user else ())) if name not in metrics]

    def judged(by: np.ndarray) -> dict[str, np.ndarray]:
        return figures_of(
            log, by, metrics, user=prepared.user, label=config.label, judge=judge, segments=prepared.segments
        )

    columns: dict[str, Any] = {"request": _texts(log.request_ids), "weight": _weights(log), **judged(scores)}
    about: dict[str, Any] = {
        "format": FORMAT,
        "data": _facts(prepared),
        "validation": {"requests": len(log), "rows": log.rows},
        "metrics": metrics,
    }
    if logged is not None:
        columns |= {LOGGED + name: values for name, values in judged(logged).items()}
        before, after = ranks(log, logged), ranks(log, scores)
        columns["agreement"] = agreements(log, before, after)
        about["moves"] = _moves(before, after)
        about["examples"] = _examples(config, prepared, scores, before, after, columns["agreement"])
    with atomic_path(out / FOLDER, overwrite=True, folder=True) as folder:
        pq.write_table(pa.table(columns), folder / REQUESTS)
        write_json(folder / "outcome.json", {**about, "sum": checksum(folder / REQUESTS)})


def read_outcome(run: Path) -> Outcome | None:
    """What a run left, if it was there to be left when it was trained."""
    folder = run / FOLDER
    if not folder.is_dir():
        return None
    about = read_json(folder / "outcome.json")
    try:
        check_format(about, FORMAT, what="what the run left", where=folder, mend="train again")
        if "sum" in about and checksum(folder / REQUESTS) != about["sum"]:
            raise DataError("the file is not as it was written", where=folder / REQUESTS, mend="train again")
        table = pq.read_table(folder / REQUESTS)
        figures = {
            name: table[name].to_numpy()
            for metric in about["metrics"]
            for name in (metric, LOGGED + metric)
            if name in table.column_names
        }
        agreement = table["agreement"].to_numpy() if "agreement" in table.column_names else np.full(len(table), np.nan)
        return Outcome(about, table["request"].to_pylist(), table["weight"].to_numpy(), agreement, figures)
    except (KeyError, TypeError, OSError, pa.ArrowException) as error:
        raise DataError(f"what the run left cannot be read ({error})", where=folder, mend="train again") from error


def _texts(ids: Any) -> Any:
    try:
        return ids.cast(pa.string())
    except pa.ArrowException:  # bytes that are no text
        return pa.array([str(value) for value in ids.to_pylist()], pa.string())


def _weights(log: Log) -> np.ndarray:
    return np.ones(len(log)) if log.weights is None else log.weights.astype(np.float64)


# --- The data ---------------------------------------------------------------------------------------------------------


def _facts(prepared: Prepared) -> dict[str, Any]:
    log, user = prepared.train, prepared.feeding_user
    facts: dict[str, Any] = {
        "fingerprint": prepared.fingerprint,
        "requests": len(log),
        "rows": log.rows,
        "sample": prepared.stream is not None,  # of what was learned from
        "features": len(log.feature_names),
        "items": {"least": int(log.lengths.min()), "mean": float(log.lengths.mean()), "most": int(log.lengths.max())},
        "fresh_feedback": user is not None,
    }
    if log.positions is not None:
        seen = by_position(log)
        first = slice(MOST_POSITIONS)
        facts["by_position"] = {
            "positions": [slot(k, prepared.segments) for k in seen.positions[first].tolist()],
            "impressions": seen.impressions[first].tolist(),
            "rates": {name: values[first].tolist() for name, values in seen.rates.items()},
            "means": {name: values[first].tolist() for name, values in seen.means.items()},
        }
        if prepared.user is not None:
            facts["true_theta"] = prepared.user.theta(torch.from_numpy(seen.positions[first])).tolist()
    return facts


# --- What moved -------------------------------------------------------------------------------------------------------


def ranks(log: Log, scores: np.ndarray) -> np.ndarray:
    """Of each row within its request, from 0; ties keep the order of the rows."""
    order = np.lexsort((-scores, log.request_of_row))
    found = np.empty(log.rows, np.int64)
    found[order] = np.arange(log.rows) - np.repeat(log.offsets[:-1], log.lengths)
    return found


def agreements(log: Log, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Kendall's τ of two rankings of each request, over the first items of the one before."""
    found = np.full(len(log), np.nan)
    by_rank = np.lexsort((before, log.request_of_row))
    after = after[by_rank]
    for length in np.unique(log.lengths):
        requests, items = np.flatnonzero(log.lengths == length), min(int(length), COMPARED_ITEMS)
        if items < 2:
            continue
        upper = np.triu(np.ones((items, items), bool), 1)
        for part in np.array_split(requests, -(-len(requests) * items**2 // PAIRS_AT_ONCE)):
            new = after[log.offsets[part][:, None] + np.arange(items)]
            kept = ((new[:, :, None] < new[:, None, :]) & upper).sum((1, 2))
            found[part] = 4 * kept / (items * (items - 1)) - 1
    return found


def _moves(before: np.ndarray, after: np.ndarray) -> dict[str, Any]:
    """Where items of each logged rank stand now, in shares; what is below the deepest rank counts as one more."""
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
    prepared: Prepared,
    scores: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    agreement: np.ndarray,
) -> list[dict[str, Any]]:
    """Some requests, with what both rankings make of their items."""
    log = prepared.validation
    try:
        labels = np.asarray(Label(config.label)(log.actions)) if log.actions else None
    except DataError:
        labels = None
    found = []
    for request, why in _chosen(agreement):
        rows = np.arange(log.offsets[request], log.offsets[request + 1])
        rows = rows[np.argsort(after[rows])][:EXAMPLE_ITEMS]
        found.append(
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
    return found


def _chosen(agreement: np.ndarray) -> list[tuple[int, str]]:
    """Requests whose rankings differ most, as usual and least, each once."""
    order = np.argsort(agreement, kind="stable")[: int(np.isfinite(agreement).sum())]
    middle = max(0, len(order) // 2 - EXAMPLES["changed as usual"] // 2)
    starts = {"changed most": 0, "changed as usual": middle, "changed least": len(order) - EXAMPLES["changed least"]}
    found: dict[int, str] = {}
    for why, start in starts.items():
        for request in order[max(0, start) : max(0, start) + EXAMPLES[why]].tolist():
            found.setdefault(request, why)
    return list(found.items())
