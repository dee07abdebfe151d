"""`ultr describe`: check and summarise a log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ultr.cli import options
from ultr.cli.options import (
    columns_text,
    free_path,
    named_columns,
    plain,
    print_next,
    print_notes,
    print_table,
    unless,
    words,
)

if TYPE_CHECKING:
    from ultr.log import Log
    from ultr.log.summary import ByPosition


def describe(
    log_path: Annotated[Path, typer.Argument(metavar="LOG", help="A log: Parquet, Arrow, CSV, JSONL or SVMlight.")],
    request: options.RequestColumn = None,
    position: options.PositionColumn = None,
    item: options.ItemColumn = None,
    features: options.FeatureColumns = None,
    categorical: options.CategoricalColumns = None,
    actions: options.ActionColumns = None,
    query: options.QueryColumn = None,
    segment: options.SegmentColumn = None,
    randomised: options.RandomisedColumn = None,
    relevance: options.RelevanceColumn = None,
    on_duplicates: options.OnDuplicates = "error",
    as_json: options.Json = False,
) -> None:
    """Check a log and summarise it: requests, the column taken for each part, and feedback by position."""
    from ultr.log import read_log
    from ultr.log.summary import by_position

    named = named_columns(locals())
    log = read_log(log_path, on_duplicates=on_duplicates, **named)  # type: ignore[arg-type]  # checked
    lengths, notes = log.lengths, [*log.notes, *_missing_values(log)]
    facts: dict[str, Any] = {
        "requests": len(log),
        "rows": log.rows,
        "items_per_request": {"min": int(lengths.min()), "mean": float(lengths.mean()), "max": int(lengths.max())},
        "features": len(log.feature_names),
        "actions": list(log.actions),
        "true_relevance": log.relevance is not None,
        "columns": dict(log.columns),
        "unused_columns": list(log.unused_columns),
        "notes": notes,
    }
    table = by_position(log) if log.positions is not None else None
    if table is not None:
        facts["positions"] = {
            "position": table.positions.tolist(),
            "impressions": table.impressions.tolist(),
            **{f"{name}_rate": rates.tolist() for name, rates in table.rates.items()},
            **{f"{name}_mean": means.tolist() for name, means in table.means.items()},
        }
    if as_json:
        print(json.dumps(facts))
        return
    words.print(f"{log!r}, {lengths.min()} to {lengths.max()} items per request", soft_wrap=True)
    if log.columns:
        words.print(plain(f"columns: {columns_text(log.columns)}"), soft_wrap=True)
    print_notes(notes)
    if log.unused_columns:
        names = ", ".join(log.unused_columns[:20]) + (" ..." if len(log.unused_columns) > 20 else "")
        words.print(plain(f"unused columns: {names} (use them with --features or --actions)"), soft_wrap=True)
    if table is None or not log.actions:
        words.print(f"the log has no {'positions' if table is None else 'actions'}, so feedback cannot be shown")
        return
    _print_by_position(table)
    print_next("bias", log_path, columns=named, on_duplicates=unless(on_duplicates, "error"), out=free_path("bias"))


def _missing_values(log: Log) -> list[str]:
    """Return a note about missing values of features, if there are some."""
    import numpy as np

    shares = dict(zip(log.feature_names, np.isnan(log.features).mean(0).tolist(), strict=True))
    if not (missing := {name: share for name, share in shares.items() if share}):
        return []
    some = ", ".join(f"{name} ({share:.1%})" for name, share in list(missing.items())[:5])
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    return [f"values of features are missing: {some}{more}; trees accept them, and networks with --missing mean"]


def _print_by_position(table: ByPosition, most: int = 20) -> None:
    """Print, by position, the share of items with each action, and the mean of actions that are not only 0 or 1."""
    means = {name: mean for name, mean in table.means.items() if not (mean == table.rates[name]).all()}
    printed = Table(title="Feedback by position", title_justify="left")
    headings = ["position", "shown", *(f"{name} rate" for name in table.rates), *(f"mean {name}" for name in means)]
    for heading in headings:
        printed.add_column(heading, justify="right")
    for i in range(min(most, len(table.positions))):
        cells = [f"{rate[i]:.2%}" for rate in table.rates.values()] + [f"{mean[i]:.4g}" for mean in means.values()]
        printed.add_row(str(table.positions[i]), f"{table.impressions[i]:,}", *cells)
    print_table(printed)
    if len(table.positions) > most:
        words.print(f"and {len(table.positions) - most} more positions (--json prints all)")
