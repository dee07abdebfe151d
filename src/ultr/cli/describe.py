"""`ultr describe`: the first command for a log. It says what was recognised, what is wrong, and what to do next."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ultr.cli import options
from ultr.cli.messages import with_options, words
from ultr.cli.options import (
    columns_text,
    free_path,
    new_table,
    print_next,
    print_notes,
    print_table,
    print_warning,
    without_none,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from ultr.checks.pitfalls import Pitfall
    from ultr.log import Log
    from ultr.log.table import ByPosition

NAMED_POSITIONS = (1, 2, 3, 5, 10, 20)  # the positions, by their order in the list, whose feedback is printed
MOST_WARNINGS, MOST_NAMES = 4, 12  # largest number of warnings, and of columns in a line, that are printed
MOST_POSITIONS = 20  # in a printed table
LEAST_ITEMS = 10  # a column with fewer values is not suggested as the id of the item
ROWS_OF_CATEGORY = 20  # a column of texts with fewer rows for each value is not suggested as a category
PERHAPS_SHOWN = ("viewed", "visible", "impression", "seen", "rendered")  # names of actions, or of what was shown
PANDAS_INDEX = re.compile(r"__index_level_\d+__|Unnamed: \d+|")  # what pandas calls an index in Parquet and CSV files
NOT_FEATURES = ("id", "time", "timestamp", "date", "day", "ts", "url", "seed")  # last words of names of other columns


@with_options("columns", options.COLUMNS)
def describe(
    *,
    log_path: options.AnyLog,
    columns: dict[str, str],
    on_duplicates: options.OnDuplicates = "error",
    where: options.Where = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print all feedback by position as a table.")] = False,
    as_json: options.Json = False,
) -> None:
    """Check a log: what was recognised in it, what is wrong, and what to do next."""
    from ultr.log import read_log
    from ultr.log.table import as_shown, by_position, missing_values

    named = without_none(columns)
    source = options.one_source(log_path)
    if not named and _describe_events(source, as_json=as_json):
        return
    rows: dict[str, Any] = {"on_duplicates": on_duplicates, "where": where or (), **named}
    log = read_log(source, **rows)
    lengths, notes = log.lengths, [note for note in log.notes if log.hidden is None or note != str(log.hidden)]
    if (missing := missing_values(log)) is not None:
        notes.append(f"values of features are missing: {missing}; rankers learn that they are missing")
    warnings = _warnings(log)
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
        "not_shown": None if log.hidden is None else asdict(log.hidden),
        "warnings": [{"name": each.name, "what": each.what, "hint": each.hint} for each in warnings],
    }
    table = by_position(log) if log.positions is not None else None
    if table is not None:
        facts["positions"] = {
            "position": [*map(as_shown, table.positions.tolist())],
            "impressions": table.impressions.tolist(),
            **{f"{name}_rate": rates.tolist() for name, rates in table.rates.items()},
            **{f"{name}_mean": means.tolist() for name, means in table.means.items()},
        }
    if as_json:
        print(json.dumps(facts))
        return
    words.say(f"{log!r}, {lengths.min()} to {lengths.max()} items per request")
    if log.columns:
        words.say(f"recognised: {columns_text(log.columns)}")
    if table is not None and log.actions:
        if verbose:
            _print_by_position(table)
        else:
            _print_rates(log, table)
        words.say(f"not shown: {_what_was_shown(log)}")
    suggested = _suggestions(log, source, rows, notes)
    if log.unused_columns:
        use = "use them with --features, --categorical, --item, --segment or --actions"
        words.say(f"unused columns: {_names(log.unused_columns)} ({use})")
    print_notes(notes)
    for pitfall in warnings[:MOST_WARNINGS]:
        print_warning(pitfall)
    if len(warnings) > MOST_WARNINGS:
        words.say(f"and {len(warnings) - MOST_WARNINGS} more warnings (--json prints all)")
    if table is None or not log.actions:
        absent, option = ("positions", "--position") if table is None else ("actions", "--actions")
        what = f"the log has no {absent}: name their column with {option}, and run this command again"
        words.say(what)
        return
    print_next(
        "bias",
        source,
        columns={**named, **suggested},
        on_duplicates=None if on_duplicates == "error" else on_duplicates,
        where=where,
        out=free_path("bias"),
    )


def _describe_events(source: str, *, as_json: bool) -> bool:
    """Print the format of a source with events of a search engine or tracker; return False if it has none."""
    from ultr.log.prepare.formats import FORMATS, find_format
    from ultr.log.readers import prepared
    from ultr.log.sources import open_source

    name = None if prepared(source) is not None else find_format(open_source(source))
    if name is None:
        return False
    if as_json:
        print(json.dumps({"format": name, "title": FORMATS[name].title}))
        return True
    words.say(f"events, not one row per item shown: {FORMATS[name].title}")
    print_next("prepare", *source.split(","), format=name, out=free_path("log.parquet"))
    return True


def _what_was_shown(log: Log) -> str:
    """Return which rows users could not see, in a sentence."""
    if log.hidden is not None:
        return str(log.hidden)
    return "no column marks it, so all rows count as shown; examination covers also sessions that ended above a row"


def _suggested_shown(log: Log, source: Any) -> str | None:
    """Return the unused column that may mark what was shown: 0 or 1, with 1 in all rows with feedback, by its name."""
    import numpy as np

    from ultr.log.readers import first_rows, numeric_columns

    if log.hidden is not None:
        return None
    rows = first_rows(source)
    for name in numeric_columns(source, [each for each in log.unused_columns if each.lower() in PERHAPS_SHOWN]):
        values = np.nan_to_num(rows[name].cast("float64").to_numpy())
        acted = np.zeros(len(rows), bool)
        for action in log.actions:
            acted |= np.nan_to_num(rows[action].cast("float64").to_numpy()) > 0
        if np.isin(values, (0, 1)).all() and len(set(values.tolist())) == 2 and values[acted].all():
            return str(name)
    return None


def _warnings(log: Log) -> list[Pitfall]:
    """Return the common problems of a log of impressions, and features that follow feedback."""
    import numpy as np

    from ultr.checks.leaks import find_leaks
    from ultr.checks.pitfalls import find_pitfalls
    from ultr.log.labels import Label, click_label

    if log.positions is None or not log.actions:
        return []
    clicked = np.asarray(Label(click_label(log.actions))(log.actions)) > 0
    leaks = [pitfall for found in find_leaks(log) for pitfall in found]
    sample = log if log.feature_names else None
    return [*leaks, *find_pitfalls(log.without_features(), clicked, sample=sample)]


def _suggestions(log: Log, source: Any, rows: dict[str, Any], notes: list[str]) -> dict[str, str]:
    """Return the options of the next command for columns that were not named, and add to the notes why."""
    from ultr.log.readers import numeric_columns

    numbers = [name for name in numeric_columns(source, log.unused_columns) if _may_be_feature(name)]
    found: dict[str, str] = {}
    if (shown := _suggested_shown(log, source)) is not None:
        what = f"if {shown} marks the rows that users could see, and is no action of theirs, pass --shown {shown}"
        notes.append(f"{what}: the other rows are then left out")
        numbers = [name for name in numbers if name != shown]
    if numbers and log.actions and not (log.feature_names and "actions" in rows):
        with_numbers = _with_numbers(source, rows, numbers, needed=not log.feature_names)
        of_feedback, of_requests = _of_feedback(with_numbers), _of_requests(with_numbers)
        numbers = [name for name in numbers if name not in {*of_feedback, *of_requests}]
        if of_feedback:
            found["actions"] = ",".join([*log.actions, *of_feedback])
            what = "looks like feedback" if len(of_feedback) == 1 else "look like feedback"
            notes.append(f"{', '.join(of_feedback)} {what}; the next command has --actions {found['actions']}")
        if of_requests and not log.feature_names:
            what = f"{', '.join(of_requests)}: the same for all items of a request, and so no help to order them"
            notes.append(f"{what}; if one marks requests in random order, name it with --randomised")
    if log.feature_names:
        numbers = []
    if (item := _suggested_item(log, source)) is not None:
        found["item"] = item
        what = f"{item} looks like the id of the item: it recurs, and never within a request"
        notes.append(f"{what}; the next command has --item {item}, which helps to tell bias from relevance")
    texts = [name for name in _suggested_categories(log, source) if name != item]
    numbers = [name for name in numbers if name != item]
    found |= {role: ",".join(names) for role, names in (("features", numbers), ("categorical", texts)) if names}
    if numbers or texts:
        what = "no column was recognised as a feature, and a ranker needs features"
        kinds = " and ".join(["numbers"] * bool(numbers) + ["categories"] * bool(texts))
        notes.append(f"{what}; the next command takes the unused {kinds}: leave out what is not known before ranking")
    return found


def _with_numbers(source: Any, rows: dict[str, Any], numbers: list[str], *, needed: bool) -> Log:
    """Return the log with these features; without any if they are not needed, and one cannot be a feature."""
    from ultr.errors import ColumnError
    from ultr.log import read_log

    try:
        return read_log(source, **{**rows, "features": numbers})
    except ColumnError:
        if needed:
            raise
        return read_log(source, **{**rows, "features": []})


def _of_feedback(log: Log) -> list[str]:
    """Return the features of a log that follow its actions, or that every row with an action has, as a view has."""
    import numpy as np

    from ultr.checks.leaks import find_leaks

    leaks = {name for found in find_leaks(log) for pitfall in found for name in pitfall.features}
    acted = np.any([values > 0 for values in log.actions.values()], axis=0)
    for i, name in enumerate(log.feature_names):
        values = log.features[:, i]
        if np.isin(values, (0, 1)).all() and acted.any() and (values[acted] == 1).all() and (values == 0).any():
            leaks.add(name)
    return [name for name in log.feature_names if name in leaks]


def _of_requests(log: Log) -> list[str]:
    """Return the features that have one value in each request, such as a flag of requests in random order."""
    import numpy as np

    values, first = log.features, log.offsets[:-1][log.request_of_row]
    if (log.lengths == 1).all():
        return []
    same = [np.array_equal(values[:, i], values[first, i], equal_nan=True) for i in range(values.shape[1])]
    return [name for name, one in zip(log.feature_names, same, strict=True) if one]


def _may_be_feature(name: str) -> bool:
    return not PANDAS_INDEX.fullmatch(name) and name.lower().replace("-", "_").split("_")[-1] not in NOT_FEATURES


def _suggested_categories(log: Log, source: Any) -> list[str]:
    """Return unused columns of texts that may be categories, by the first rows; none if the log has features.

    They have few values, and differ between the items of a request. A text of the whole request, such as a device, does
    not help to order its items.
    """
    import pyarrow.compute as pc

    from ultr.log.readers import first_rows

    request = log.columns.get("request")
    if log.feature_names or not isinstance(request, str):
        return []
    rows, found = first_rows(source), []
    for name in log.unused_columns:
        if not ({request, name} <= set(rows.column_names) and _may_be_feature(name)):
            continue
        values = pc.count_distinct(rows[name]).as_py()
        if _is_text(rows.schema.field(name)) and 2 <= values <= len(rows) / ROWS_OF_CATEGORY:
            of_request = rows.group_by(request).aggregate([(name, "count_distinct")])
            if pc.max(of_request[f"{name}_count_distinct"]).as_py() > 1:
                found.append(name)
    return found


def _is_text(column: pa.Field) -> bool:
    import pyarrow as pa

    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _suggested_item(log: Log, source: Any) -> str | None:
    """Return the unused column that looks most like the id of the item, by the first rows; None if there is none.

    It is a text, or a whole number that is called an id. It recurs, but never within a request.
    """
    import pyarrow as pa

    from ultr.log.readers import first_rows

    request = log.columns.get("request")
    if "item" in log.columns or not isinstance(request, str):
        return None
    rows, found = first_rows(source), {}
    for name in log.unused_columns:
        if not {request, name} <= set(rows.column_names):
            continue
        field = rows.schema.field(name)
        is_id = pa.types.is_integer(field.type) and name.lower().endswith("id")
        if not (_is_text(field) or is_id) or rows[name].null_count:
            continue
        pairs, requests, values = (
            rows.group_by(keys).aggregate([]).num_rows for keys in ([request, name], [request], [name])
        )
        if pairs == len(rows) >= 2 * requests and LEAST_ITEMS <= values <= len(rows) / 2:
            found[name] = values
    return max(found, key=found.__getitem__) if found else None


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")


def _print_rates(log: Log, table: ByPosition) -> None:
    """Print the rate of the click by position on one line."""
    from ultr.log.labels import CLICKS
    from ultr.log.table import as_shown, named_places

    name = next((each for each in log.actions if each.lower() in CLICKS), next(iter(log.actions)))
    positions = table.positions.tolist()
    places = sorted({0, *named_places(positions, NAMED_POSITIONS)})
    rates = ", ".join(f"{table.rates[name][i]:.2%} at {as_shown(positions[i])}" for i in places)
    words.say(f"feedback by position: {name} {rates} (--verbose prints all)")


def _print_by_position(table: ByPosition) -> None:
    """Print, by position, the share of items with each action, and the mean of actions that are not only 0 or 1."""
    from ultr.log.table import as_shown

    means = {name: mean for name, mean in table.means.items() if not (mean == table.rates[name]).all()}
    headings = ["position", "shown", *(f"{name} rate" for name in table.rates), *(f"mean {name}" for name in means)]
    printed = new_table("Feedback by position", numbers=headings)
    for i in range(min(MOST_POSITIONS, len(table.positions))):
        cells = [f"{rate[i]:.2%}" for rate in table.rates.values()] + [f"{mean[i]:.4g}" for mean in means.values()]
        printed.add_row(str(as_shown(int(table.positions[i]))), f"{table.impressions[i]:,}", *cells)
    print_table(printed)
    if len(table.positions) > MOST_POSITIONS:
        words.say(f"and {len(table.positions) - MOST_POSITIONS} more positions (--json prints all)")
